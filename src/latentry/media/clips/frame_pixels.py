"""A decoded video frame as a player shows it: upright, in square pixels, 8-bit sRGB."""

from __future__ import annotations

from typing import Any

import numpy as np

from latentry.media.hdr import PRIMARIES, TRANSFERS, tone_map
from latentry.media.images import Pixels

_BT709, _BT601, _BT2020 = 1, 5, 9  # swscale's numbers of colour matrices
_MATRIX = {1: _BT709, 4: _BT601, 5: _BT601, 6: _BT601, 7: _BT709, 9: _BT2020, 10: _BT2020}
_HD_HEIGHT = 720


def hdr_transfer(frame: Any) -> str | None:
    """``pq`` or ``hlg`` for a frame of HDR, None for others."""
    return TRANSFERS.get(int(frame.color_trc))


def upright_shape(frame: Any, stream: Any) -> tuple[int, int]:
    """(height, width) of the frame as it is shown."""
    width = _shown_width(frame, stream)
    turned, _, _ = _orientation(frame)
    return (width, frame.height) if turned else (frame.height, width)


def to_rgb(frame: Any, stream: Any) -> Pixels:
    """8-bit RGB in square pixels, upright and deinterlaced, using the frame's own colour matrix and range.

    HDR is tone-mapped by the rule of ``latentry.media.hdr``.
    """
    transfer = hdr_transfer(frame)
    matrix = _MATRIX.get(int(frame.colorspace), _BT709 if frame.height >= _HD_HEIGHT else _BT601)
    full_range = int(frame.color_range) == 2 or frame.format.name.startswith("yuvj")
    rgb = frame.reformat(
        format="rgb24" if transfer is None else "rgb48le",
        width=_shown_width(frame, stream),
        height=frame.height,
        src_colorspace=matrix,
        dst_colorspace=matrix,
        src_color_range=2 if full_range else 1,
        dst_color_range=2,
    )
    pixels: Pixels = rgb.to_ndarray()
    if transfer is not None:
        primaries = PRIMARIES.get(int(frame.color_primaries), "bt2020")
        pixels = tone_map(pixels.astype(np.float32) / 65535, transfer, primaries)
    if frame.interlaced_frame:
        pixels = _deinterlaced(pixels)
    turned, flipped_x, flipped_y = _orientation(frame)
    if turned:
        pixels = pixels.transpose(1, 0, 2)
    if flipped_x:
        pixels = pixels[:, ::-1]
    if flipped_y:
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _shown_width(frame: Any, stream: Any) -> int:
    """The width in square pixels: some videos store pixels that are not square."""
    shape = stream.sample_aspect_ratio
    return max(1, round(frame.width * float(shape))) if shape else int(frame.width)


def _orientation(frame: Any) -> tuple[bool, bool, bool]:
    """How the display matrix turns a frame: exchange rows and columns, then mirror left-right, then upside down.

    The matrix maps the stored (x, y) to the shown (a*x + c*y, b*x + d*y). Angles other than multiples of 90 degrees
    are rounded.
    """
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return False, False, False
    a, b, _, c, d, *_ = np.frombuffer(bytes(data), dtype=np.int32).tolist()
    if abs(a) + abs(d) >= abs(b) + abs(c):
        return False, a < 0, d < 0
    return True, c < 0, b < 0


def _deinterlaced(pixels: Pixels) -> Pixels:
    """Keep the even lines, which are one field, and replace the others by the mean of their neighbours."""
    kept = pixels[::2].astype(np.uint16)
    below = np.concatenate([kept[1:], kept[-1:]])
    filled: Pixels = pixels.copy()
    filled[1::2] = ((kept + below + 1) // 2)[: len(filled[1::2])].astype(np.uint8)
    return filled
