"""Memory that the tensors of a batch are read into, side by side as long as they are alike.

A field whose tensors are alike is one stacked tensor as soon as it is read. Nothing is copied to stack it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from latentry.cache.read.buffer_pool import BufferPool
from latentry.cache.read.columns import Column
from latentry.errors import CacheFileError


def plain_tensor(tensor: torch.Tensor, name: str, describe: Callable[[], str]) -> torch.Tensor:
    """The tensor without its gradient; an error if it is sparse or otherwise cannot be stacked."""
    if tensor.layout != torch.strided:
        raise CacheFileError(f"{describe()}: {name} is {tensor.layout}; only plain tensors can be served")
    return tensor.detach()


class BatchBuffers:
    """Takes the tensors of some samples, in any order, and returns them as columns."""

    def __init__(self, num_samples: int, pool: BufferPool) -> None:
        self._num_samples = num_samples
        self._pool = pool
        self._fields: dict[str, _FieldBuffer] = {}

    def buffer(self, i: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Memory for the bytes of a tensor of sample ``i``."""
        return self._field(name, dtype, shape).buffer(i, dtype, shape)

    def put(self, i: int, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor of sample ``i`` that is already in memory."""
        self._field(name, tensor.dtype, tuple(tensor.shape)).put(i, tensor)

    def _field(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> _FieldBuffer:
        """The field of this name; its first tensor decides dtype and shape of the stacked tensor."""
        if name not in self._fields:
            self._fields[name] = _FieldBuffer(self._num_samples, dtype, shape, self._pool)
        return self._fields[name]

    def columns(self) -> dict[str, Column]:
        """All fields, once their bytes have been read."""
        return {name: field.column() for name, field in self._fields.items()}


class _FieldBuffer:
    """The tensors of one field: stacked, except for those that differ from the first one."""

    def __init__(
        self, num_samples: int, dtype: torch.dtype, shape: tuple[int, ...], pool: BufferPool
    ) -> None:
        self._kind = (dtype, shape)
        self._in_stack: set[int] = set()
        self._others: dict[int, torch.Tensor] = {}
        self._stack = pool.empty((num_samples, *shape), dtype)

    @functools.cached_property
    def _rows(self) -> npt.NDArray[np.uint8]:
        num_samples = len(self._stack)
        return _bytes_of(self._stack).reshape(num_samples, self._stack.nbytes // num_samples)

    def buffer(self, i: int, dtype: torch.dtype, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        if (dtype, shape) == self._kind:
            self._in_stack.add(i)
            row: npt.NDArray[np.uint8] = self._rows[i]
            return row
        self._others[i] = torch.empty(shape, dtype=dtype)
        return _bytes_of(self._others[i])

    def put(self, i: int, tensor: torch.Tensor) -> None:
        if (tensor.dtype, tuple(tensor.shape)) == self._kind:
            self._in_stack.add(i)
            self._stack[i].copy_(tensor)
        else:
            self._others[i] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def column(self) -> Column:
        if len(self._in_stack) == len(self._stack):
            return self._stack
        return [
            self._stack[i] if i in self._in_stack else self._others.get(i) for i in range(len(self._stack))
        ]


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    content: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return content
