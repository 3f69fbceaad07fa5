"""The header of AVIF and HEIC files, which are boxes of ISO/IEC 14496-12.

Planning needs a size, an orientation and whether the pixels are HDR. The libraries that decode these files read them
whole to tell, and Pillow does not tell the last.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from latentry.media.formats.header import ByteReader, HdrFormat, ImageHeader, hdr_format

_MAX_META_BYTES = 1 << 24
_ROTATIONS = {0: 1, 1: 8, 2: 3, 3: 6}
"""Quarter turns counterclockwise to EXIF orientations."""
_MIRRORED_ROTATIONS = {
    (0, 0): 4, (0, 1): 2, (1, 0): 5, (1, 1): 7, (2, 0): 2, (2, 1): 4, (3, 0): 7, (3, 1): 5,
}  # fmt: skip
"""Quarter turns counterclockwise, then a mirror, to EXIF orientations."""


def read_heif_header(read: ByteReader) -> ImageHeader | None:
    """The header of an AVIF or HEIC file; None if it is something else or unusual."""
    try:
        meta = next((box for box in _top_level_boxes(read) if box[0] == b"meta"), None)
        return None if meta is None else _parse_meta(read(meta[1], min(meta[2], _MAX_META_BYTES)))
    except (struct.error, IndexError, KeyError, ValueError):
        return None


def _top_level_boxes(read: ByteReader) -> Iterator[tuple[bytes, int, int]]:
    """Name, offset and length of the content of each box of the file."""
    offset = 0
    while len(head := read(offset, 16)) >= 8:
        size, kind = struct.unpack_from(">I4s", head)
        header_bytes = 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", head, 8)
            header_bytes = 16
        if 0 < size < header_bytes:
            return
        yield kind, offset + header_bytes, size - header_bytes if size else _MAX_META_BYTES
        if size == 0:
            return
        offset += size


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name and content of each box in a block of boxes."""
    offset = 0
    while offset + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, offset)
        if size < 8:
            raise ValueError(size)
        yield kind, data[offset + 8 : offset + size]
        offset += size


def _parse_meta(meta: bytes) -> ImageHeader | None:
    """Read the properties of the primary image in the content of a ``meta`` box."""
    children = dict(_boxes(meta[4:]))
    primary_box = children[b"pitm"]
    primary = int.from_bytes(primary_box[4:6] if primary_box[0] == 0 else primary_box[4:8], "big")
    groups = dict(_boxes(children[b"iprp"]))
    properties = list(_boxes(groups[b"ipco"]))
    size: tuple[int, int] | None = None
    turns, mirror, hdr = 0, None, None
    for index in _associations(groups[b"ipma"])[primary]:
        kind, data = properties[index - 1]
        if kind == b"ispe":
            width, height = struct.unpack_from(">II", data, 4)
            size = width, height
        elif kind == b"irot" and mirror is None:
            turns = data[0] & 3
        elif kind == b"imir":
            mirror = data[0] & 1
        elif kind == b"colr" and data[:4] == b"nclx":
            hdr = _colours(data)
        elif kind in (b"irot", b"clap"):
            return None
    if size is None:
        return None
    orientation = _ROTATIONS[turns] if mirror is None else _MIRRORED_ROTATIONS[turns, mirror]
    return ImageHeader(*size, orientation, hdr)


def _colours(data: bytes) -> HdrFormat | None:
    primaries, transfer = struct.unpack_from(">HH", data, 4)
    return hdr_format(primaries, transfer)


def _associations(box: bytes) -> dict[int, list[int]]:
    """The properties of each item: their numbers, counted from 1, in order."""
    version, wide = box[0], box[3] & 1
    (num_items,) = struct.unpack_from(">I", box, 4)
    offset = 8
    found: dict[int, list[int]] = {}
    for _ in range(num_items):
        (item,) = struct.unpack_from(">H" if version < 1 else ">I", box, offset)
        offset += 2 if version < 1 else 4
        count = box[offset]
        offset += 1
        numbers = struct.unpack_from(f">{count}{'H' if wide else 'B'}", box, offset)
        offset += count * (2 if wide else 1)
        found[item] = [number & (0x7FFF if wide else 0x7F) for number in numbers if number]
    return found
