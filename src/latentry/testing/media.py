"""Clips whose frames carry their number, drawn so large that it survives any codec and any scaling."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_BITS = 10
_TICKS_PER_S = 1000


def counter_frame(number: int, width: int = 96, height: int = 64) -> npt.NDArray[np.uint8]:
    """A frame that shows its number as ten large squares, dark for 0 and light for 1, in two rows of five."""
    frame = np.full((height, width, 3), 128, np.uint8)
    for bit in range(_BITS):
        row, column = divmod(bit, _BITS // 2)
        top, left = row * height // 2, column * width // (_BITS // 2)
        frame[top : top + height // 2, left : left + width // (_BITS // 2)] = 235 if number >> bit & 1 else 20
    return frame


def read_counter(frame: npt.NDArray[np.uint8]) -> int:
    """Read the number from a frame: ``read_counter(pixels)``.

    Args:
        frame: uint8 [H,W,3], of any size.
    """
    height, width = frame.shape[:2]
    number = 0
    for bit in range(_BITS):
        row, column = divmod(bit, _BITS // 2)
        y, x = (2 * row + 1) * height // 4, (2 * column + 1) * width // _BITS
        number |= int(frame[y - 1 : y + 2, x - 1 : x + 2].mean() > 128) << bit
    return number


def make_counter_clip(
    path: Path,
    num_frames: int = 60,
    *,
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    size: tuple[int, int] = (96, 64),
    rate: int = 25,
    ticks: Callable[[int], int] | None = None,
    rotation: int = 0,
    gop_size: int = 12,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> Path:
    """Write a clip of numbered frames: ``make_counter_clip(tmp_path / "clip.mp4", 60, codec="libx265")``.

    Args:
        path: The file to write; its suffix decides the container.
        num_frames: How many frames; at most 1024.
        codec: The encoder, by its FFmpeg name.
        pixel_format: The pixel format, by its FFmpeg name.
        size: (width, height) in pixels.
        rate: Frames per second.
        ticks: The time of each frame in milliseconds, for a variable frame rate; None for a constant one.
        rotation: The rotation in the header, in degrees counter-clockwise.
        gop_size: Frames from one keyframe to the next.
        options: Options of the encoder.
        container_options: Options of the container.

    Returns:
        The path.
    """
    import av

    container: Any
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height = size
        stream.pix_fmt = pixel_format
        stream.codec_context.gop_size = gop_size
        if rotation:
            stream.set_display_rotation(rotation)
        unit = Fraction(1, _TICKS_PER_S) if ticks else Fraction(1, rate)
        stream.time_base = stream.codec_context.time_base = unit
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(counter_frame(number, *size), format="rgb24")
            frame.pts = ticks(number) if ticks else number
            frame.time_base = unit
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path
