"""Where the tensors of a batch are read into: side by side, as long as they are alike.

So a batch is one tensor of each name from the beginning, and is never stacked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from latentry.cache.read.buffer_pool import BufferPool
from latentry.errors import CacheFileError


class Loaded(NamedTuple):
    """Several samples. A tensor is in ``together`` if all have it in one shape, else in the values of those that do."""

    values: list[dict[str, Any]]
    together: dict[str, torch.Tensor]
    """Each [number of samples, ...]."""


def plain_tensor(tensor: torch.Tensor, name: str, where: Callable[[], str]) -> torch.Tensor:
    """The tensor without its gradient; an error if it is sparse, or of another kind that cannot be stacked."""
    if tensor.layout != torch.strided:
        raise CacheFileError(f"{where()}: {name} is {tensor.layout}; only plain tensors can be served")
    return tensor.detach()


class BatchBuffers:
    """Where all tensors of some samples go."""

    def __init__(self, count: int, memory: BufferPool) -> None:
        self._count = count
        self._memory = memory
        self._rooms: dict[str, _Room] = {}

    def buffer(self, i: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """What the bytes of a tensor of sample ``i`` are to be read into."""
        return self._room(name, dtype, shape).buffer(i, dtype, shape)

    def put(self, i: int, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor of sample ``i`` from elsewhere."""
        self._room(name, tensor.dtype, tuple(tensor.shape)).put(i, tensor)

    def _room(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> _Room:
        """That of this name; the first tensor decides how large it is."""
        if name not in self._rooms:
            self._rooms[name] = _Room(self._count, dtype, shape, self._memory)
        return self._rooms[name]

    def loaded(self, values: list[dict[str, Any]]) -> Loaded:
        """These samples with the tensors that were read; those that do not lie together are added to the values."""
        together = {}
        for name, room in self._rooms.items():
            if room.is_full:
                together[name] = room.base
            else:
                for i, tensor in room.tensors().items():
                    values[i][name] = tensor
        return Loaded(values, together)

    def of(self, i: int) -> dict[str, torch.Tensor]:
        """A single sample's tensors."""
        found = {name: room.tensors() for name, room in self._rooms.items()}
        return {name: tensors[i] for name, tensors in found.items() if i in tensors}


class _Room:
    """Where the tensors of one name go: side by side, as long as they are like the first of them."""

    def __init__(self, count: int, dtype: torch.dtype, shape: tuple[int, ...], memory: BufferPool) -> None:
        self._kind = (dtype, shape)
        self._inside: set[int] = set()
        self._others: dict[int, torch.Tensor] = {}
        self.base = memory.empty((count, *shape), dtype)

    @functools.cached_property
    def _buffers(self) -> npt.NDArray[np.uint8]:
        count = len(self.base)
        return _bytes_of(self.base).reshape(count, self.base.nbytes // count)

    def buffer(self, i: int, dtype: torch.dtype, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        if (dtype, shape) == self._kind:
            self._inside.add(i)
            buffer: npt.NDArray[np.uint8] = self._buffers[i]
            return buffer
        self._others[i] = torch.empty(shape, dtype=dtype)
        return _bytes_of(self._others[i])

    def put(self, i: int, tensor: torch.Tensor) -> None:
        if (tensor.dtype, tuple(tensor.shape)) == self._kind:
            self._inside.add(i)
            self.base[i].copy_(tensor)
        else:
            self._others[i] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    @property
    def is_full(self) -> bool:
        return len(self._inside) == len(self.base)

    def tensors(self) -> dict[int, torch.Tensor]:
        """Those of the samples that have one."""
        return {i: self.base[i] for i in self._inside} | self._others


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    content: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return content
