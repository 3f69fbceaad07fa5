"""Reads the pickle inside a ``torch.save`` file without unpickling it.

Nothing in the pickle is imported or called. The reader knows numbers, strings, lists, tuples, dictionaries and the
description of a plain tensor. It raises ``UnknownPickle`` for anything else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class UnknownPickle(Exception):
    """The pickle holds something that this reader does not know."""


class TensorLocation(NamedTuple):
    """A tensor inside a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """In bytes, from the start of the file."""
    num_bytes: int


def tensor_location(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> TensorLocation:
    """The location of a contiguous tensor; ``UnknownPickle`` if no tensor can have the shape."""
    count = 1
    for side in shape:
        if type(side) is not int or not 0 <= side < 1 << 31:
            raise UnknownPickle(f"shape {shape!r}")
        count *= side
    return TensorLocation(dtype, shape, offset, count * dtype.itemsize)


def read_pickle(code: bytes, find_record: Callable[[str], tuple[int, int]]) -> Any:
    """The pickled object, with a ``TensorLocation`` for each tensor.

    A damaged pickle may raise any exception.

    Args:
        code: The pickle.
        find_record: Returns offset and size in bytes of a record of the archive, such as ``data/0``.
    """
    return _Reader(code, find_record).read()


class _Global(NamedTuple):
    """A name in the pickle. It is compared, never imported."""

    name: str


class _Storage(NamedTuple):
    dtype: torch.dtype
    record: str
    count: Any


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
_CONSTANTS: dict[int, Callable[[], Any]] = {
    0x7D: dict, 0x5D: list, 0x29: tuple, 0x4E: lambda: None, 0x88: lambda: True, 0x89: lambda: False,
}  # fmt: skip


class _Reader:
    """Follows the pickle opcode by opcode."""

    def __init__(self, code: bytes, find_record: Callable[[str], tuple[int, int]]) -> None:
        self._code = code
        self._find_record = find_record
        self._stack: list[Any] = []
        self._outer_stacks: list[list[Any]] = []
        """The stacks below each mark, as Python's own unpickler keeps them."""
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        code, stack, memo = self._code, self._stack, self._memo
        position = 0
        # The most frequent opcodes come first.
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
            elif op == 0x68:  # BINGET
                stack.append(memo[code[position]])
                position += 1
            elif op == 0x28:  # MARK
                self._outer_stacks.append(stack)
                stack = self._stack = []
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
            elif op == 0x80:  # PROTO
                position += 1
            elif op in _CONSTANTS:
                stack.append(_CONSTANTS[op]())
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or self._outer_stacks:
                    raise UnknownPickle
                return stack[0]
            else:
                self._combine(op)
                stack = self._stack

    def _combine(self, op: int) -> None:
        stack = self._stack
        if op in (0x85, 0x86, 0x87):  # TUPLE1 to TUPLE3
            length = op - 0x84
            stack[-length:] = [tuple(stack[-length:])]
        elif op == 0x74:  # TUPLE
            items = self._pop_to_mark()
            self._stack.append(tuple(items))
        elif op == 0x75:  # SETITEMS
            items = self._pop_to_mark()
            self._set(items[::2], items[1::2])
        elif op == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            self._set([key], [value])
        elif op in (0x65, 0x61):  # APPENDS, APPEND
            items = self._pop_to_mark() if op == 0x65 else [stack.pop()]
            if not isinstance(self._stack[-1], list):
                raise UnknownPickle
            self._stack[-1].extend(items)
        elif op == 0x51:  # BINPERSID
            kind, storage, record, _, count = stack.pop()
            if kind != "storage":
                raise UnknownPickle
            stack.append(_Storage(_STORAGES[storage], f"data/{record}", count))
        elif op == 0x52:  # REDUCE
            arguments, name = stack.pop(), stack.pop()
            stack.append(self._rebuilt(name, arguments))
        else:
            raise UnknownPickle

    def _set(self, keys: list[Any], values: list[Any]) -> None:
        if type(self._stack[-1]) is not dict or not all(type(key) is str for key in keys):
            raise UnknownPickle
        self._stack[-1].update(zip(keys, values, strict=True))

    def _pop_to_mark(self) -> list[Any]:
        """Everything above the last mark."""
        items = self._stack
        self._stack = self._outer_stacks.pop()
        return items

    def _rebuilt(self, name: Any, arguments: tuple[Any, ...]) -> Any:
        """The result of a call, for the two functions that a plain dictionary of tensors needs."""
        if name == _ORDERED and arguments == ():
            return {}
        if name != _REBUILD:
            raise UnknownPickle
        # A seventh argument would hold tensor metadata, such as the negative bit.
        storage, first, shape, strides, _, hooks = arguments
        if type(storage) is not _Storage or type(first) is not int:
            raise UnknownPickle
        expected = 1
        for side, stride in zip(reversed(shape), reversed(strides), strict=True):
            if side != 1 and stride != expected:
                raise UnknownPickle
            expected *= side
        offset, num_bytes = self._find_record(storage.record)
        if storage.count * storage.dtype.itemsize != num_bytes:
            raise UnknownPickle
        stored = tensor_location(storage.dtype, shape, offset + first * storage.dtype.itemsize)
        if hooks or first < 0 or first * storage.dtype.itemsize + stored.num_bytes > num_bytes:
            raise UnknownPickle
        return stored
