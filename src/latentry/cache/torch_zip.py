"""The ZIP directory of a ``torch.save`` file: where each record's bytes are.

The reader uses it to read tensors without unpickling, the writer to fill in tensors without copying them. Only the
layout that ``torch.save`` writes is known: uncompressed records, no comment, no 64-bit sizes. Any other archive
raises ``UnknownArchive``, and the caller goes through ``torch.load`` or ``torch.save`` instead.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

Read = Callable[[int, int], bytes]
"""``read(count, offset)`` returns ``count`` bytes of the archive, or fewer where it ends."""

ENTRY_CHECKSUM = 16
"""Position of the CRC-32 within a directory entry."""
DESCRIPTOR_MARK = b"PK\x07\x08"
"""Begins the data descriptor that follows a record's bytes; the record's CRC-32 comes next."""

_END = struct.Struct("<4s6xH2IH")
"""Mark, number of entries, size and offset of the directory, length of the comment."""
_END_MARK = b"PK\x05\x06"
_ENTRY = struct.Struct("<4s6xH8x2I3H8xI")
"""Mark, compression, packed size, size, lengths of name, extra field and comment, offset of the local header."""
_ENTRY_MARK = b"PK\x01\x02"
_HEADER = struct.Struct("<4s22x2H")
"""Mark, lengths of name and extra field."""
_HEADER_MARK = b"PK\x03\x04"
_STORED = 0


class UnknownArchive(Exception):
    """The bytes are no ZIP archive, or not one with the layout that ``torch.save`` writes."""


class ZipEntry(NamedTuple):
    """One record of an archive."""

    name: str
    """Without the archive's own top folder: ``data.pkl``, ``data/0``."""
    entry_offset: int
    """Where its directory entry begins, counted from the start of the archive."""
    header_offset: int
    """Where its local header begins; the record's bytes follow the header."""
    num_bytes: int
    compression: int
    """The ZIP method; 0 is uncompressed, the only one that ``read_entries`` accepts."""


_new_entry = partial(tuple.__new__, ZipEntry)
"""``ZipEntry._make`` without its checks: it takes a third of the time, and a batch has hundreds of entries."""


def read_entries(read: Read, size_bytes: int) -> dict[str, ZipEntry]:
    """The records of an archive of this size, by name; reads only its directory.

    >>> entries = read_entries(lambda count, offset: content[offset : offset + count], len(content))
    >>> entries["data.pkl"].num_bytes
    339
    """
    try:
        mark, num_entries, length, start, comment = _END.unpack(read(_END.size, size_bytes - _END.size))
        if mark != _END_MARK or comment:
            raise UnknownArchive("it does not end with a ZIP directory")
        directory = read(length, start)
        entries = {}
        position = 0
        for _ in range(num_entries):
            mark, compression, packed, num_bytes, name_len, extra_len, comment_len, header = (
                _ENTRY.unpack_from(directory, position)
            )
            name_start = position + _ENTRY.size
            name_end = name_start + name_len
            name = directory[name_start:name_end].decode().partition("/")[2]
            if mark != _ENTRY_MARK or compression != _STORED or packed != num_bytes:
                raise UnknownArchive(f"{name!r} is compressed or damaged")
            entries[name] = _new_entry((name, start + position, header, num_bytes, compression))
            position = name_end + extra_len + comment_len
    except (struct.error, UnicodeDecodeError) as error:
        raise UnknownArchive(str(error)) from None
    if position != length or len(entries) != num_entries:
        raise UnknownArchive("its directory is damaged")
    return entries


def content_offset(read: Read, entry: ZipEntry) -> int:
    """Where the record's bytes begin."""
    try:
        mark, name_len, extra_len = _HEADER.unpack(read(_HEADER.size, entry.header_offset))
    except struct.error as error:
        raise UnknownArchive(str(error)) from None
    if mark != _HEADER_MARK:
        raise UnknownArchive(f"{entry.name!r} has no header where the directory says")
    return entry.header_offset + _HEADER.size + int(name_len) + int(extra_len)
