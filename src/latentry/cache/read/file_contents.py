"""What a cache file holds and where in it each tensor lies, without loading any.

For a batch the tensors are then read straight to where they are trained from. Two containers are known:
safetensors, and what ``torch.save`` makes of a flat dictionary of tensors and plain values. Of the latter the
list of contents is a pickle; it is not unpickled here. A small reader goes through it that knows numbers, texts,
tuples and the description of a tensor, and gives up on anything else; such files go to
``torch.load(weights_only=True)``, as all files do that are not read for a batch.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from latentry.cache.format import PLAIN_VALUES_KEY
from latentry.cache.packed_format import SAFETENSORS_DTYPES

_END_BYTES = 1 << 13
_END = struct.Struct("<4s4H2IH")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_STORED = 0
_MOST_BYTES = 1 << 24
"""Of what is not a tensor's: more than any cache file has, and no harm to memory."""
_PLAIN = (str, int, float, bool, type(None))


class TensorLocation(NamedTuple):
    """Where a tensor is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_contents(descriptor: int, suffix: str) -> dict[str, Any] | None:
    """The file's dictionary with a ``Stored`` for each tensor; None if this reader does not know the kind."""
    try:
        file = _Ends(descriptor)
        found = _safetensors(file) if suffix == ".safetensors" else _torch(file)
        known = all(type(key) is str and _is_known(value, file.size) for key, value in found.items())
    except Exception:  # whatever is odd about a file, the libraries that load it whole have the last word
        return None
    return found if known else None


def _is_known(value: Any, size: int) -> bool:
    """A tensor within the file, or a plain value: nothing that only looks like one."""
    if isinstance(value, TensorLocation):
        whole = type(value.offset) is int and all(type(side) is int for side in value.shape)
        return whole and 0 <= value.offset <= size - value.num_bytes
    if type(value) in (list, tuple):
        return all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


class _Unknown(Exception):
    """Something that this reader leaves to others."""


class _Ends:
    """A file whose beginning and end are read once, for most of what is asked for lies there.

    Each call of the system costs little itself, but lets Python's lock go, which others wait for.
    """

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._head = os.pread(descriptor, _END_BYTES, 0)
        self._tail_start = max(0, self.size - _END_BYTES)
        self._tail = os.pread(descriptor, _END_BYTES, self._tail_start)

    def read(self, count: int, offset: int) -> bytes:
        """So many bytes from there on, or fewer where the file ends."""
        if count > _MOST_BYTES:
            raise _Unknown
        if offset + count <= len(self._head):
            return self._head[offset : offset + count]
        if offset >= self._tail_start:
            return self._tail[offset - self._tail_start :][:count]
        return os.pread(self._descriptor, count, offset)


# ---- safetensors ----------------------------------------------------------------------------


def _safetensors(file: _Ends) -> dict[str, Any]:
    length = int.from_bytes(file.read(8, 0), "little")
    header = msgspec.json.decode(file.read(length, 8), type=dict[str, dict[str, Any]])
    plain = header.pop("__metadata__", {}).get(PLAIN_VALUES_KEY, "{}")
    found: dict[str, Any] = {}
    last = 0
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        dtype = SAFETENSORS_DTYPES[tensor["dtype"]]
        found[name] = _stored(dtype, tuple(tensor["shape"]), 8 + length + start)
        if found[name].num_bytes != end - start:
            raise _Unknown
        last = max(last, end)
    if 8 + length + last != file.size:
        raise _Unknown
    return found | msgspec.json.decode(plain, type=dict[str, Any])


def _stored(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> TensorLocation:
    count = 1
    for side in shape:
        if type(side) is not int or not 0 <= side < 1 << 31:
            raise _Unknown
        count *= side
    return TensorLocation(dtype, shape, offset, count * dtype.itemsize)


# ---- what torch.save writes -----------------------------------------------------------------


def _torch(file: _Ends) -> dict[str, Any]:
    records = _records(file)

    def contents(name: str) -> tuple[int, int]:
        """Where a record's bytes begin, and how many there are."""
        local, num_bytes = records[name]
        header = _LOCAL.unpack(file.read(_LOCAL.size, local))
        if header[0] != b"PK\x03\x04":
            raise _Unknown
        return local + _LOCAL.size + header[9] + header[10], num_bytes

    if "byteorder" in records and file.read(6, contents("byteorder")[0]) != b"little":
        raise _Unknown
    offset, num_bytes = contents("data.pkl")
    found = _Contents(file.read(num_bytes, offset), contents).read()
    if type(found) is not dict:
        raise _Unknown
    return found


def _records(file: _Ends) -> dict[str, tuple[int, int]]:
    """An archive's directory: of each record its name, where its header lies, and how many bytes it has."""
    mark, *_, count, length, start, comment = _END.unpack(file.read(_END.size, file.size - _END.size))
    if mark != b"PK\x05\x06" or comment:
        raise _Unknown
    directory = file.read(length, start)
    records: dict[str, tuple[int, int]] = {}
    position = 0
    for _ in range(count):
        entry = _ENTRY.unpack_from(directory, position)
        if entry[4] != _STORED or entry[8] != entry[9]:
            raise _Unknown
        begin = position + _ENTRY.size
        name = directory[begin : begin + entry[10]].decode()
        records[name.partition("/")[2]] = (entry[16], entry[9])
        position = begin + entry[10] + entry[11] + entry[12]
    if length != position:
        raise _Unknown
    return records


class _Mark:
    """The beginning of some items on the stack."""


class _Global(NamedTuple):
    """A name in the pickle. It is compared, never looked up."""

    name: str


class _Storage(NamedTuple):
    dtype: torch.dtype
    record: str
    count: Any


_MARK = _Mark()
_REBUILD = _Global("torch._utils _rebuild_tensor_v2")
_ORDERED = _Global("collections OrderedDict")
_STORAGES = {
    _Global(f"torch {name}Storage"): dtype
    for name, dtype in {
        "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}  # fmt: skip


class _Contents:
    """Goes through the list of contents, opcode by opcode."""

    def __init__(self, code: bytes, contents: Callable[[str], tuple[int, int]]) -> None:
        self._code = code
        self._contents = contents
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        code, stack, memo = self._code, self._stack, self._memo
        position = 0
        while True:
            op = code[position]
            position += 1
            if op == 0x71:  # BINPUT
                memo[code[position]] = stack[-1]
                position += 1
            elif op == 0x58:  # BINUNICODE
                length = int.from_bytes(code[position : position + 4], "little")
                position += 4
                stack.append(code[position : position + length].decode())
                position += length
            elif op == 0x4B:  # BININT1
                stack.append(code[position])
                position += 1
            elif op == 0x4D:  # BININT2
                stack.append(int.from_bytes(code[position : position + 2], "little"))
                position += 2
            elif op == 0x4A:  # BININT
                stack.append(int.from_bytes(code[position : position + 4], "little", signed=True))
                position += 4
            elif op == 0x8A:  # LONG1
                length = code[position]
                stack.append(
                    int.from_bytes(code[position + 1 : position + 1 + length], "little", signed=True)
                )
                position += 1 + length
            elif op == 0x47:  # BINFLOAT
                stack.append(struct.unpack_from(">d", code, position)[0])
                position += 8
            elif op == 0x68:  # BINGET
                stack.append(memo[code[position]])
                position += 1
            elif op in (0x6A, 0x72):  # LONG_BINGET, LONG_BINPUT
                number = int.from_bytes(code[position : position + 4], "little")
                position += 4
                if op == 0x6A:
                    stack.append(memo[number])
                else:
                    memo[number] = stack[-1]
            elif op == 0x63:  # GLOBAL
                end = code.index(b"\n", code.index(b"\n", position) + 1)
                stack.append(_Global(code[position:end].decode().replace("\n", " ")))
                position = end + 1
            elif op == 0x28:  # MARK
                stack.append(_MARK)
            elif op == 0x80:  # PROTO
                position += 1
            elif op in _CONSTANTS:
                stack.append(_CONSTANTS[op]())
            elif op == 0x2E:  # STOP
                (result,) = stack
                return result
            else:
                self._combine(op)

    def _combine(self, op: int) -> None:
        stack = self._stack
        if op in (0x85, 0x86, 0x87):  # TUPLE1 to TUPLE3
            length = op - 0x84
            stack[-length:] = [tuple(stack[-length:])]
        elif op == 0x74:  # TUPLE
            stack.append(tuple(self._items()))
        elif op == 0x75:  # SETITEMS
            items = self._items()
            self._set(items[::2], items[1::2])
        elif op == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            self._set([key], [value])
        elif op in (0x65, 0x61):  # APPENDS, APPEND
            items = self._items() if op == 0x65 else [stack.pop()]
            if not isinstance(stack[-1], list):
                raise _Unknown
            stack[-1].extend(items)
        elif op == 0x51:  # BINPERSID
            kind, storage, record, _, count = stack.pop()
            if kind != "storage":
                raise _Unknown
            stack.append(_Storage(_STORAGES[storage], f"data/{record}", count))
        elif op == 0x52:  # REDUCE
            arguments, name = stack.pop(), stack.pop()
            stack.append(self._rebuilt(name, arguments))
        else:
            raise _Unknown

    def _set(self, keys: list[Any], values: list[Any]) -> None:
        if type(self._stack[-1]) is not dict or not all(type(key) is str for key in keys):
            raise _Unknown
        self._stack[-1].update(zip(keys, values, strict=True))

    def _items(self) -> list[Any]:
        """Everything back to the last mark."""
        items = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _rebuilt(self, name: Any, arguments: tuple[Any, ...]) -> Any:
        if name == _ORDERED and arguments == ():
            return {}
        if name != _REBUILD:
            raise _Unknown
        # A seventh argument would say that the sign is turned, or worse.
        storage, first, shape, strides, _, hooks = arguments
        if type(storage) is not _Storage or type(first) is not int:
            raise _Unknown
        expected = 1
        for side, stride in zip(reversed(shape), reversed(strides), strict=True):
            if side != 1 and stride != expected:
                raise _Unknown
            expected *= side
        offset, num_bytes = self._contents(storage.record)
        if storage.count * storage.dtype.itemsize != num_bytes:
            raise _Unknown
        stored = _stored(storage.dtype, shape, offset + first * storage.dtype.itemsize)
        if hooks or first < 0 or first * storage.dtype.itemsize + stored.num_bytes > num_bytes:
            raise _Unknown
        return stored


_CONSTANTS: dict[int, Callable[[], Any]] = {
    0x7D: dict, 0x5D: list, 0x29: tuple, 0x4E: lambda: None, 0x88: lambda: True, 0x89: lambda: False,
}  # fmt: skip
