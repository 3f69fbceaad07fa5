"""PNG: its header without decoding, and its chunks without those that Pillow stumbles over.

Pillow refuses a PNG for a broken EXIF block, a wrong checksum of a comment, or more than a megabyte of text. None
of them matters to pixels. And it looks for EXIF data behind the pixels by decoding them. So the chunks are walked
here: planning reads the headers of chunks only, and decoding gives Pillow a PNG that has nothing but pixels.
"""

from __future__ import annotations

import binascii
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from latentry.media.formats.header import (
    ByteReader,
    HdrFormat,
    ImageHeader,
    buffer_reader,
    exif_orientation,
    hdr_format,
    xmp_orientation,
)

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PIXEL_CHUNKS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT"})
_TEXT_CHUNKS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
_XMP_KEY, _EXIF_KEY = b"XML:com.adobe.xmp", b"Raw profile type exif"
_MAX_TEXT_BYTES = 1 << 20
_MAX_PROFILE_BYTES = 1 << 24
_END = b"\0\0\0\0IEND\xae\x42\x60\x82"


class _Chunk(NamedTuple):
    kind: bytes
    offset: int
    """Where its data begins."""
    length: int


@dataclass(frozen=True, slots=True)
class CleanPng:
    """A PNG without what does not matter to pixels."""

    header: ImageHeader
    content: bytes
    bit_depth: int
    profile: bytes | None
    """The ICC profile; None if there is none or it cannot be read."""
    damage: str | None
    """What is wrong with the chunks that hold pixels."""


def read_png_header(read: ByteReader) -> ImageHeader | None:
    """The header of a PNG, from the headers of its chunks; None if the file is not a PNG."""
    if read(0, 8) != SIGNATURE:
        return None
    size: tuple[int, int] | None = None
    hdr: HdrFormat | None = None
    exif: int | None = None
    older_exif, xmp = 1, 1
    for chunk in _chunks(read):
        if chunk.kind == b"IHDR" and chunk.length >= 8:
            width, height = struct.unpack(">II", read(chunk.offset, 8))
            size = width, height
        elif chunk.kind == b"cICP" and chunk.length >= 2:
            primaries, transfer = read(chunk.offset, 2)
            hdr = hdr_format(primaries, transfer)
        elif chunk.kind == b"eXIf" and exif is None:
            exif = exif_orientation(read(chunk.offset, chunk.length))
        elif chunk.kind in _TEXT_CHUNKS and chunk.length <= _MAX_TEXT_BYTES:
            key = read(chunk.offset, 32).split(b"\0", 1)[0]
            if key == _XMP_KEY:
                xmp = xmp_orientation(read(chunk.offset, chunk.length))
            elif key == _EXIF_KEY:
                older_exif = _text_exif_orientation(chunk.kind, read(chunk.offset, chunk.length))
    if size is None:
        return None
    found = next((value for value in (exif or 1, older_exif, xmp) if value != 1), 1)
    return ImageHeader(*size, found, hdr)


def clean_png(content: bytes) -> CleanPng | None:
    """The chunks that hold pixels, as another PNG; None if the content is not a PNG with a header."""
    read = buffer_reader(content)
    header = read_png_header(read)
    if header is None:
        return None
    parts = [SIGNATURE]
    damage = profile = None
    bit_depth = 8
    for kind, offset, length in _chunks(read):
        if kind == b"iCCP" and profile is None:
            profile = _profile(content[offset : offset + length])
        if kind not in _PIXEL_CHUNKS:
            continue
        data = content[offset : offset + length]
        checksum = binascii.crc32(data, binascii.crc32(kind))
        stored = content[offset + length : offset + length + 4]
        if len(stored) == 4 and int.from_bytes(stored, "big") != checksum:
            damage = damage or f"the checksum of a chunk {kind.decode()} is wrong"
        if kind == b"IHDR":
            bit_depth = data[8] if length > 8 else 8
        parts += [len(data).to_bytes(4, "big"), kind, data, checksum.to_bytes(4, "big")]
    return CleanPng(header, b"".join([*parts, _END]), bit_depth, profile, damage)


def _chunks(read: ByteReader) -> Iterator[_Chunk]:
    """The chunks up to the end of the image or of the file. The last one may be cut."""
    offset = 8
    while len(head := read(offset, 8)) == 8:
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if kind == b"IEND" or not kind.isalpha():
            return
        yield _Chunk(kind, offset + 8, length)
        offset += 12 + length


def _profile(data: bytes) -> bytes | None:
    """The ICC profile of an iCCP chunk."""
    _, _, compressed = data.partition(b"\0")
    try:
        return zlib.decompressobj().decompress(compressed[1:], _MAX_PROFILE_BYTES)
    except zlib.error:
        return None


def _text_exif_orientation(kind: bytes, data: bytes) -> int:
    """The orientation in EXIF data that is written in hexadecimal digits, as ImageMagick did before eXIf chunks."""
    _, _, text = data.partition(b"\0")
    try:
        if kind == b"zTXt":
            text = zlib.decompressobj().decompress(text[1:], _MAX_TEXT_BYTES)
        elif kind == b"iTXt":
            text = text[2:].split(b"\0", 2)[-1]
        return exif_orientation(bytes.fromhex("".join(text.decode("latin-1").split("\n")[3:])))
    except (ValueError, zlib.error):
        return 1
