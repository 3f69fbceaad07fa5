"""Files as ``torch.save`` writes them, without its copies and without holding Python's lock.

``torch.save`` copies a sample several times and lets no other thread run meanwhile; while a run writes dozens
of samples a second, the thread that feeds the device would wait for that. So torch is asked for the outline of
the file, which takes a fraction of a millisecond, and the tensors' bytes are put between its parts.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch

_DESCRIPTOR = b"PK\x07\x08"
_CHECKSUM_IN_DESCRIPTOR = 4
_ENTRY = struct.Struct("<4s6H3I5H2I")
_ENTRY_MARK = b"PK\x01\x02"
_CHECKSUM_IN_ENTRY = 16


def torch_file_parts(data: dict[str, Any]) -> list[Any]:
    """The bytes of ``torch.save(data)`` in pieces, for a dictionary of tensors and plain values."""
    contents = [
        value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for value in data.values()
        if isinstance(value, torch.Tensor) and value.numel()
    ]
    outline = _Outline()
    with torch.serialization.skip_data():
        torch.save(_hollow(data), outline)  # type: ignore[arg-type]
    waiting = iter(contents)
    parts: list[Any] = []
    checksums: list[bytes] = []
    for part in outline.parts:
        if isinstance(part, int):
            content = next(waiting)
            assert len(content) == part, "torch has laid out its file in an unknown way"
            checksums.append(struct.pack("<I", zlib.crc32(content)))
            parts.append(content)
            continue
        if part.startswith(_DESCRIPTOR) and parts and isinstance(parts[-1], memoryview):
            part[_CHECKSUM_IN_DESCRIPTOR : _CHECKSUM_IN_DESCRIPTOR + 4] = checksums[-1]
        parts.append(part)
    _enter_checksums(parts, data, checksums)
    return parts


def _hollow(data: dict[str, Any]) -> dict[str, Any]:
    """The same dictionary with tensors that hold nothing yet, each in a storage of its own.

    CaptionBatches that are equal are made one object: a pickle says a text once and then refers to it, so which are
    one would show in the bytes.
    """
    hollow = {}
    for key, value in data.items():
        if isinstance(value, torch.Tensor):
            value = torch.empty(value.shape, dtype=value.dtype)
        hollow[sys.intern(key)] = sys.intern(value) if type(value) is str else value
    return hollow


class _Outline:
    """What torch takes for a file: what is written to it, and how much was left out in between."""

    def __init__(self) -> None:
        self.parts: list[bytearray | int] = []

    def write(self, content: Any) -> int:
        self.parts.append(bytearray(content))
        return len(content)

    def seek(self, distance: int, whence: int) -> None:
        assert whence == 1, "torch has left out bytes in an unknown way"
        if distance:
            self.parts.append(distance)

    def flush(self) -> None:
        pass


def _enter_checksums(parts: list[Any], data: dict[str, Any], checksums: list[bytes]) -> None:
    """The archive's directory has the checksums a second time."""
    tensors = [value for value in data.values() if isinstance(value, torch.Tensor)]
    names = [f"data/{number}" for number, tensor in enumerate(tensors) if tensor.numel()]
    by_name = dict(zip(names, checksums, strict=True))
    for part in parts:
        if isinstance(part, bytearray) and part.startswith(_ENTRY_MARK):
            for name, position in _entries(part):
                if name in by_name:
                    position += _CHECKSUM_IN_ENTRY
                    part[position : position + 4] = by_name[name]


def _entries(directory: bytearray) -> Iterator[tuple[str, int]]:
    """Names, without the archive's own, and where their entries begin."""
    position = 0
    while directory.startswith(_ENTRY_MARK, position):
        entry = _ENTRY.unpack_from(directory, position)
        begin = position + _ENTRY.size
        end = begin + entry[10]
        yield directory[begin:end].decode().partition("/")[2], position
        position = end + entry[11] + entry[12]
