"""The header of a JPEG, ten times as fast as opening the file with Pillow.

Planning probes every file of a folder, and most are JPEGs. This parser handles common headers only. For everything
unusual it returns None and the caller asks Pillow.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_FIRST_BYTES = 1 << 14
_MAX_BYTES = 1 << 18
_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_PROGRESSIVE_FRAMES = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_START = b"\xff\xd8\xff"
_SCAN, _END, _APP1, _APP2 = 0xDA, 0xD9, 0xE1, 0xE2
_EXIF, _XMP, _ICC = b"Exif\x00\x00", b"http://ns.adobe.com/xap/1.0/", b"ICC_PROFILE\x00"
_ORIENTATION, _SHORT = 0x0112, 3


class JpegHeader(NamedTuple):
    """What planning and decoding need to know about a JPEG."""

    width: int
    """As stored, before the orientation is applied."""
    height: int
    orientation: int
    """EXIF orientation, 1 to 8; 1 if the header has none. Values outside that range are kept as they are."""
    num_components: int
    """1 for grey, 3 for colour, 4 for CMYK."""
    has_profile: bool
    """Whether an ICC colour profile is embedded."""
    is_progressive: bool
    scan_offset: int
    """Where the first scan begins, with its marker."""


def read_jpeg_header(path: Path) -> JpegHeader | None:
    """Read the header of a JPEG file; None if the file is not a JPEG or its header is unusual."""
    with open(path, "rb", buffering=0) as file:
        head = file.read(_FIRST_BYTES)
        if not head.startswith(_START):
            return None
        try:
            return _parse(head)
        except _UnusualError:
            return None
        except IndexError:  # a long header, with a thumbnail or a colour profile
            return parse_jpeg_header(head + file.read(_MAX_BYTES))


def parse_jpeg_header(content: bytes) -> JpegHeader | None:
    """Like ``read_jpeg_header``, for the bytes of a file or its beginning."""
    try:
        return _parse(content) if content.startswith(_START) else None
    except (IndexError, struct.error, _UnusualError):
        return None


def _parse(head: bytes) -> JpegHeader | None:
    """Read marker after marker until the image data begins; an ``IndexError`` means that more bytes are needed."""
    frame: tuple[int, int, int] | None = None
    orientation: int | None = None
    num_exif, xmp_orientation, has_profile, is_progressive = 0, False, False, False
    position = 2
    while True:
        if head[position] != 0xFF:
            return None
        marker = head[position + 1]
        if marker == _SCAN:
            break
        if marker in (0xFF, 0x00, 0x01, _END) or 0xD0 <= marker <= 0xD8:
            return None
        length = (head[position + 2] << 8) + head[position + 3]
        start, end = position + 4, position + 2 + length
        if length < 2:
            return None
        head[end]  # raises an IndexError unless the whole segment is here
        if marker in _FRAMES:
            frame = struct.unpack_from(">HHB", head, start + 1)
            is_progressive = marker in _PROGRESSIVE_FRAMES
        elif marker == _APP1 and head.startswith(_EXIF, start):
            num_exif += 1
            orientation = _orientation(head[start + len(_EXIF) : end])
        elif marker == _APP1 and head.startswith(_XMP, start):
            xmp_orientation = xmp_orientation or b"Orientation" in head[start:end]
        elif marker == _APP2 and head.startswith(_ICC, start):
            has_profile = True
        position = end
    if frame is None or 0 in frame or num_exif > 1 or (xmp_orientation and orientation is None):
        return None
    height, width, num_components = frame
    return JpegHeader(
        width,
        height,
        1 if orientation is None else orientation,
        num_components,
        has_profile,
        is_progressive,
        position,
    )


class _UnusualError(ValueError):
    """The header has something that is left to Pillow."""


def _orientation(tiff: bytes) -> int | None:
    """The orientation in a block of EXIF data, None if it has none; an ``_UnusualError`` if it is malformed."""
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(tiff[:4])
    if order is None:
        raise _UnusualError
    found = None
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (num_entries,) = struct.unpack_from(order + "H", tiff, start)
        for i in range(num_entries):
            tag, value_type, count = struct.unpack_from(order + "HHI", tiff, start + 2 + 12 * i)
            if tag == _ORIENTATION:
                if (value_type, count) != (_SHORT, 1) or found is not None:
                    raise _UnusualError
                (found,) = struct.unpack_from(order + "H", tiff, start + 10 + 12 * i)
    except struct.error:
        raise _UnusualError from None
    return found
