"""WebP: its header without decoding, and its chunks with a header that is true to them.

libwebp refuses a file whose header promises an ICC profile or EXIF data that is not there. And Pillow opens a WebP by
reading it whole. Here planning reads the headers of chunks only, and decoding gives Pillow a WebP without metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from latentry.media.formats.header import (
    ByteReader,
    ImageHeader,
    buffer_reader,
    exif_orientation,
    xmp_orientation,
)

_PROFILE_FLAG, _ALPHA_FLAG, _ANIMATION_FLAG = 0x20, 0x10, 0x02
_PIXEL_CHUNKS = frozenset({b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF"})


class CleanWebp(NamedTuple):
    """A WebP without metadata."""

    header: ImageHeader
    content: bytes
    profile: bytes | None


def is_webp(prefix: bytes) -> bool:
    """Whether a file that begins with these bytes is a WebP."""
    return prefix[:4] == b"RIFF" and prefix[8:12] == b"WEBP"


def read_webp_header(read: ByteReader) -> ImageHeader | None:
    """The header of a WebP, from the headers of its chunks; None if the file is not a WebP that can be read."""
    if not is_webp(read(0, 12)):
        return None
    size: tuple[int, int] | None = None
    exif, xmp = 1, 1
    for kind, offset, length in _chunks(read):
        if kind == b"VP8X" and size is None:
            data = read(offset, 10)
            size = (1 + int.from_bytes(data[4:7], "little"), 1 + int.from_bytes(data[7:10], "little"))
        elif kind == b"VP8 " and size is None:
            data = read(offset, 10)
            if data[3:6] == b"\x9d\x01\x2a":
                size = (
                    int.from_bytes(data[6:8], "little") & 0x3FFF,
                    int.from_bytes(data[8:10], "little") & 0x3FFF,
                )
        elif kind == b"VP8L" and size is None:
            bits = int.from_bytes(read(offset, 5)[1:], "little")
            size = (1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
        elif kind == b"EXIF":
            exif = exif_orientation(read(offset, length))
        elif kind == b"XMP ":
            xmp = xmp_orientation(read(offset, length))
    return None if size is None else ImageHeader(*size, exif if exif != 1 else xmp)


def clean_webp(content: bytes) -> CleanWebp | None:
    """The chunks that hold pixels, as another WebP; None if the content is not a WebP that can be read."""
    read = buffer_reader(content)
    header = read_webp_header(read)
    if header is None:
        return None
    chunks = list(_chunks(read))
    profile = next((content[at : at + size] for kind, at, size in chunks if kind == b"ICCP"), None)
    parts = [b"WEBP"]
    for kind, offset, length in chunks:
        data = content[offset : offset + length]
        if kind == b"VP8X":
            data = bytes([data[0] & (_ALPHA_FLAG | _ANIMATION_FLAG)]) + data[1:]
        elif kind not in _PIXEL_CHUNKS:
            continue
        parts += [kind, length.to_bytes(4, "little"), data, b"\0" * (len(data) % 2)]
    body = b"".join(parts)
    return CleanWebp(header, b"RIFF" + len(body).to_bytes(4, "little") + body, profile)


def _chunks(read: ByteReader) -> Iterator[tuple[bytes, int, int]]:
    """Name, offset and length of each chunk. The last one may be cut."""
    offset = 12
    while len(head := read(offset, 8)) == 8:
        length = int.from_bytes(head[4:], "little")
        yield head[:4], offset + 8, length
        offset += 8 + length + length % 2
