"""The pixels of HDR images with all their bits, from FFmpeg: Pillow reduces PNG and AVIF to 8 bits."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

_CONTAINERS = {"PNG": "png_pipe", "AVIF": "mov"}
_BT2020 = 9
_MATRIX = {1: 1, 5: 5, 6: 5, 9: 9, 10: 9}
"""Colour matrices of ITU-T H.273 to those of swscale."""


def decode_deep(content: bytes, image_type: str) -> npt.NDArray[np.floating[Any]] | None:
    """Code values from 0 to 1, float32 [H,W,4] with opacity, as stored; None if FFmpeg cannot decode the image.

    Args:
        content: The file.
        image_type: ``PNG`` or ``AVIF``.
    """
    import av

    try:
        with av.open(io.BytesIO(content), format=_CONTAINERS[image_type]) as container:
            frame: Any = next(container.decode(video=0))
            matrix = _MATRIX.get(int(frame.colorspace), _BT2020)
            full_range = int(frame.color_range) == 2 or frame.format.name.startswith(
                ("rgb", "gbr", "gray", "ya")
            )
            deep = frame.reformat(
                format="rgba64le",
                src_colorspace=matrix,
                dst_colorspace=matrix,
                src_color_range=2 if full_range else 1,
                dst_color_range=2,
            )
    except (av.error.FFmpegError, StopIteration, ValueError):
        return None
    values: npt.NDArray[np.uint16] = deep.to_ndarray()
    scaled: npt.NDArray[np.floating[Any]] = values.astype(np.float32) / np.float32(65535)
    return scaled
