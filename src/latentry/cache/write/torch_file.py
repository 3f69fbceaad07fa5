"""Files as ``torch.save`` writes them, without its copies and without holding the GIL.

``torch.save`` copies a sample several times and holds the GIL meanwhile. A run writes dozens of samples a second, and
the thread that feeds the device would wait for the GIL. So ``torch.save`` writes only the skeleton of the file, which
takes a fraction of a millisecond, and the tensors' bytes are inserted where the skeleton leaves gaps for them.

This depends on the layout of PyTorch's files. A layout that is not known is detected, and ``torch.save`` then writes
the whole file.
"""

from __future__ import annotations

import functools
import io
import logging
import struct
import sys
import zlib
from bisect import bisect_right
from typing import Any

import torch

from latentry.cache.torch_zip import (
    DESCRIPTOR_MARK,
    ENTRY_CHECKSUM,
    UnknownArchive,
    content_offset,
    read_entries,
)

logger = logging.getLogger(__name__)


def torch_file_parts(data: dict[str, Any]) -> list[Any]:
    """The bytes of ``torch.save(data)`` as buffers to be written one after the other.

    >>> with open("sample.pt", "wb") as file:
    ...     file.writelines(torch_file_parts({"latent": latent, "prompt": "a cat"}))

    ``data`` is a dictionary of tensors and plain values. The buffers share the tensors' memory where possible, so
    write them before the tensors change.
    """
    tensors = [
        value.detach().cpu().contiguous() for value in data.values() if isinstance(value, torch.Tensor)
    ]
    try:
        return _filled_skeleton(data, tensors)
    except Exception as error:  # whatever is unknown about the layout, torch.save itself has the last word
        _warn_once(f"{type(error).__name__}: {error}")
    return [_saved_whole(data, tensors)]


@functools.lru_cache(maxsize=8)
def _warn_once(reason: str) -> None:
    logger.warning(
        "torch %s writes files in an unknown layout (%s); using torch.save, which is slower",
        torch.__version__,
        reason,
    )


def _saved_whole(data: dict[str, Any], tensors: list[torch.Tensor]) -> memoryview:
    """What ``torch.save`` makes of the data, each tensor in its own storage."""
    copies = iter([tensor.clone() for tensor in tensors])
    output = io.BytesIO()
    torch.save(_with_tensors(data, copies), output)
    return output.getbuffer()


def _with_tensors(data: dict[str, Any], tensors: Any) -> dict[str, Any]:
    """The same dictionary with other tensors.

    Equal strings become one object: a pickle stores a string once and then refers to it, so which strings are one
    object would show in the bytes.
    """
    result = {}
    for key, value in data.items():
        if isinstance(value, torch.Tensor):
            value = next(tensors)
        elif type(value) is list:
            value = [_interned(item) for item in value]
        result[sys.intern(key)] = _interned(value)
    return result


def _interned(value: Any) -> Any:
    return sys.intern(value) if type(value) is str else value


def _filled_skeleton(data: dict[str, Any], tensors: list[torch.Tensor]) -> list[Any]:
    skeleton = _Skeleton()
    hollow = (torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors)
    with torch.serialization.skip_data():
        torch.save(_with_tensors(data, hollow), skeleton)  # type: ignore[arg-type]
    entries = read_entries(skeleton.read, skeleton.size_bytes)
    for number, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        content = tensor.view(-1).view(torch.uint8).numpy().data
        entry = entries[f"data/{number}"]
        start = content_offset(skeleton.read, entry)
        skeleton.fill(start, content)
        if entry.num_bytes != len(content) or skeleton.read(4, start + len(content)) != DESCRIPTOR_MARK:
            raise UnknownArchive(f"{entry.name} is not followed by its descriptor")
        checksum = struct.pack("<I", zlib.crc32(content))
        skeleton.overwrite(start + len(content) + len(DESCRIPTOR_MARK), checksum)
        skeleton.overwrite(entry.entry_offset + ENTRY_CHECKSUM, checksum)
    return skeleton.parts()


class _Skeleton:
    """Takes the place of a file in ``torch.save``: keeps what is written, and the gaps left for tensors."""

    def __init__(self) -> None:
        self._parts: list[Any] = []
        """Bytes that were written, a number of bytes for a gap, or the content of a filled gap."""
        self._starts: list[int] = []
        self.size_bytes = 0

    def _append(self, part: bytearray | int) -> None:
        self._parts.append(part)
        self._starts.append(self.size_bytes)
        self.size_bytes += part if isinstance(part, int) else len(part)

    def write(self, content: Any) -> int:
        self._append(bytearray(content))
        return len(content)

    def seek(self, distance: int, whence: int) -> None:
        if whence != io.SEEK_CUR or distance < 0:
            raise UnknownArchive(f"it is written with seek({distance}, {whence})")
        if distance:
            self._append(distance)

    def flush(self) -> None:
        pass

    def _find(self, offset: int, length: int) -> tuple[bytearray, int]:
        """The written part with these bytes, and where in it they begin."""
        i = bisect_right(self._starts, offset) - 1
        part = self._parts[i] if i >= 0 else None
        begin = offset - self._starts[i]
        if not isinstance(part, bytearray) or begin + length > len(part):
            raise UnknownArchive(f"{length} bytes at {offset} were not written in one piece")
        return part, begin

    def read(self, count: int, offset: int) -> bytes:
        part, begin = self._find(offset, count)
        return bytes(part[begin : begin + count])

    def overwrite(self, offset: int, content: bytes) -> None:
        part, begin = self._find(offset, len(content))
        part[begin : begin + len(content)] = content

    def fill(self, offset: int, content: memoryview) -> None:
        """Put the content into the gap that begins here."""
        i = bisect_right(self._starts, offset) - 1
        if i < 0 or self._starts[i] != offset or self._parts[i] != len(content):
            raise UnknownArchive(f"there is no gap of {len(content)} bytes at {offset}")
        self._parts[i] = content

    def parts(self) -> list[Any]:
        """All bytes in order."""
        if any(isinstance(part, int) for part in self._parts):
            raise UnknownArchive("a gap belongs to no tensor")
        return self._parts
