"""What a cache file holds, and where in it each tensor lies, without loading any tensor.

Batches are read with this: the tensors' bytes go straight from the file into the batch. Two containers are known:
safetensors, and the file that ``torch.save`` makes of a flat dictionary of tensors and plain values. Every other file
is loaded by ``torch.load(weights_only=True)``, which is slower.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from latentry.cache.format import PLAIN_VALUES_KEY
from latentry.cache.packed_format import SAFETENSORS_DTYPES
from latentry.cache.read.pickle_reader import TensorLocation, read_pickle, tensor_location
from latentry.cache.torch_zip import content_offset, read_entries

_END_BYTES = 1 << 13
_MAX_HEADER_BYTES = 1 << 24
"""Limit for everything but tensors. No cache file has more, and a damaged file cannot exhaust the memory."""
_PLAIN_TYPES = (str, int, float, bool, type(None))


class _UnknownFile(Exception):
    """The file is damaged, or holds something that is not known here."""


def read_contents(descriptor: int, suffix: str) -> dict[str, Any] | None:
    """The file's dictionary with a ``TensorLocation`` for each tensor; None if the layout is unknown.

    Args:
        descriptor: The open file.
        suffix: ``.safetensors``, or any other for a ``torch.save`` file.
    """
    try:
        file = _FileEnds(descriptor)
        contents = _safetensors(file) if suffix == ".safetensors" else _torch_file(file)
        known = all(type(key) is str and _is_known(value, file.size) for key, value in contents.items())
    except Exception:  # whatever is wrong with a file, the library that loads it whole reports it
        return None
    return contents if known else None


def _is_known(value: Any, size: int) -> bool:
    """Whether it is a tensor within the file or a plain value; subclasses of plain types are not."""
    if isinstance(value, TensorLocation):
        whole = type(value.offset) is int and all(type(side) is int for side in value.shape)
        return whole and 0 <= value.offset <= size - value.num_bytes
    if type(value) in (list, tuple):
        return all(type(item) in _PLAIN_TYPES for item in value)
    return type(value) in _PLAIN_TYPES


class _FileEnds:
    """A file whose first and last kilobytes are read once, because most of what is looked up is there.

    A system call is cheap, but it releases the GIL, and taking the GIL back can take long when other threads run.
    """

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._head = os.pread(descriptor, _END_BYTES, 0)
        self._tail_start = max(0, self.size - _END_BYTES)
        self._tail = os.pread(descriptor, _END_BYTES, self._tail_start)

    def read(self, count: int, offset: int) -> bytes:
        """``count`` bytes from ``offset``, or fewer where the file ends."""
        if count > _MAX_HEADER_BYTES:
            raise _UnknownFile
        if offset + count <= len(self._head):
            return self._head[offset : offset + count]
        if offset >= self._tail_start:
            return self._tail[offset - self._tail_start :][:count]
        return os.pread(self._descriptor, count, offset)


def _safetensors(file: _FileEnds) -> dict[str, Any]:
    length = int.from_bytes(file.read(8, 0), "little")
    header = msgspec.json.decode(file.read(length, 8), type=dict[str, dict[str, Any]])
    plain = header.pop("__metadata__", {}).get(PLAIN_VALUES_KEY, "{}")
    contents: dict[str, Any] = {}
    last = 0
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        dtype = SAFETENSORS_DTYPES[tensor["dtype"]]
        contents[name] = tensor_location(dtype, tuple(tensor["shape"]), 8 + length + start)
        if contents[name].num_bytes != end - start:
            raise _UnknownFile
        last = max(last, end)
    if 8 + length + last != file.size:
        raise _UnknownFile
    return contents | msgspec.json.decode(plain, type=dict[str, Any])


def _torch_file(file: _FileEnds) -> dict[str, Any]:
    entries = read_entries(file.read, file.size)

    def find_record(name: str) -> tuple[int, int]:
        entry = entries[name]
        return content_offset(file.read, entry), entry.num_bytes

    if "byteorder" in entries and file.read(6, find_record("byteorder")[0]) != b"little":
        raise _UnknownFile
    offset, num_bytes = find_record("data.pkl")
    contents = read_pickle(file.read(num_bytes, offset), find_record)
    if type(contents) is not dict:
        raise _UnknownFile
    return contents
