"""What the header of an image says, whatever its format."""

from __future__ import annotations

import os
import re
from typing import IO, NamedTuple, Protocol

from PIL import Image

from latentry.media.hdr import PRIMARIES, TRANSFERS

ORIENTATION_TAG = 0x0112
_MAX_EXIF_BYTES = 1 << 20
_MAX_READ_BYTES = 1 << 24
"""A damaged header may ask for gigabytes."""
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=[\"']|>)([1-8])")


class HdrFormat(NamedTuple):
    """How the pixels of an HDR image are encoded."""

    transfer: str
    """``pq`` or ``hlg``."""
    primaries: str
    """A key of ``latentry.media.hdr.PRIMARIES``' values."""


class ImageHeader(NamedTuple):
    """What planning needs to know about an image."""

    width: int
    """As stored, before the orientation is applied."""
    height: int
    orientation: int = 1
    """EXIF orientation, 1 to 8."""
    hdr: HdrFormat | None = None

    @property
    def shown_size(self) -> tuple[int, int]:
        """(width, height) after the orientation is applied."""
        return (self.height, self.width) if self.orientation in (5, 6, 7, 8) else (self.width, self.height)


class ByteReader(Protocol):
    """Reads parts of a file or of a buffer."""

    def __call__(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes at ``offset``; fewer at the end."""


def file_reader(file: IO[bytes]) -> ByteReader:
    """Reads parts of an open file, without moving its position."""
    descriptor = file.fileno()
    return lambda offset, count: os.pread(descriptor, min(count, _MAX_READ_BYTES), offset)


def buffer_reader(content: bytes) -> ByteReader:
    """Reads parts of a buffer."""
    return lambda offset, count: content[offset : offset + count]


def hdr_format(primaries: int, transfer: int) -> HdrFormat | None:
    """The HDR format that numbers of ITU-T H.273 describe; None if the transfer function is not PQ or HLG."""
    name = TRANSFERS.get(transfer)
    return None if name is None else HdrFormat(name, PRIMARIES.get(primaries, "bt2020"))


def exif_orientation(exif: bytes) -> int:
    """The orientation in a block of EXIF data; 1 if it has none or is broken, as viewers do."""
    if not 8 <= len(exif) <= _MAX_EXIF_BYTES:
        return 1
    found = Image.Exif()
    try:
        found.load(exif)
        value = found.get(ORIENTATION_TAG, 1)
    except Exception:  # Pillow raises many types of errors for broken EXIF data
        return 1
    return value if value in range(1, 9) else 1


def xmp_orientation(xmp: bytes) -> int:
    """The orientation in a block of XMP data; 1 if it has none."""
    found = _XMP_ORIENTATION.search(xmp)
    return int(found[1]) if found else 1
