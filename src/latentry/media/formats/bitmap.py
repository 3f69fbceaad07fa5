"""BMP files whose pixels are described by bit masks, of which Pillow reads a few layouts only."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from latentry.errors import MediaError
from latentry.media.formats.header import ByteReader, ImageHeader
from latentry.media.pillow import check_num_pixels

_BIT_FIELDS = (3, 6)


def read_bitmap_header(read: ByteReader) -> ImageHeader | None:
    """The header of a BMP; None if the file is not a BMP, or one of the oldest type."""
    head = read(0, 26)
    if head[:2] != b"BM" or len(head) < 26:
        return None
    header_bytes, width, height = struct.unpack_from("<Iii", head, 14)
    return ImageHeader(width, abs(height)) if header_bytes >= 40 and width > 0 and height else None


def decode_masked_bitmap(content: bytes) -> npt.NDArray[np.uint8] | None:
    """The pixels of a BMP with bit masks, uint8 [H,W,4] with opacity; None for any other file.

    Raises:
        MediaError: The masks or the size make no sense, or pixels are missing.
    """
    if content[:2] != b"BM" or len(content) < 70:
        return None
    (start,) = struct.unpack_from("<I", content, 10)
    header_bytes, width, height, _, num_bits, compression = struct.unpack_from("<IiiHHI", content, 14)
    if header_bytes < 40 or compression not in _BIT_FIELDS or num_bits not in (16, 32):
        return None
    has_opacity = compression == 6 or header_bytes >= 56
    masks = struct.unpack_from("<IIII", content, 54)
    if width <= 0 or height == 0:
        raise MediaError("cannot be decoded: the size in its header makes no sense")
    check_num_pixels(width, abs(height))
    stride = (width * num_bits + 31) // 32 * 4
    if len(content) < start + stride * abs(height):
        return None  # Pillow reads what is there, or says what is missing
    rows = np.frombuffer(content, np.uint8, stride * abs(height), start).reshape(abs(height), stride)
    values = rows.view("<u4" if num_bits == 32 else "<u2")[:, :width].astype(np.uint32)
    pixels = np.full((*values.shape, 4), 255, np.uint8)
    for channel, mask in enumerate(masks if has_opacity and masks[3] else masks[:3]):
        pixels[..., channel] = _channel(values, mask)
    if not pixels[..., 3].any():  # how many programs write opaque pixels
        pixels[..., 3] = 255
    return pixels[::-1] if height > 0 else pixels


def _channel(values: npt.NDArray[np.uint32], mask: int) -> npt.NDArray[np.uint8]:
    """The bits under a mask, scaled to 0..255."""
    if mask == 0:
        raise MediaError("cannot be decoded: a bit mask in its header is empty")
    shift = (mask & -mask).bit_length() - 1
    largest = mask >> shift
    if largest & (largest + 1):
        raise MediaError("cannot be decoded: a bit mask in its header has gaps")
    levels = (values & np.uint32(mask)) >> np.uint32(shift)
    return np.asarray(levels.astype(np.float64) * (255 / largest) + 0.5).astype(np.uint8)
