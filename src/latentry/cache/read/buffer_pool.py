"""Memory for batches, used again once nobody holds the batch that was in it.

A fresh buffer of some ten megabytes is given back to the system when it is freed, and each of its pages is
cleared and mapped anew for the next batch: that costs as much as reading the data. A trainer holds one or
two batches at a time, so a few buffers serve for ever.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from latentry.cache.packed_format import ALIGNMENT

_MOST_IDLE = 16
_SMALL_BYTES = 1 << 18


class BufferPool:
    """Where a loader's batches are put together. One may be used by several threads."""

    def __init__(self, pin_memory: bool = False) -> None:
        self._pin = pin_memory
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[BufferPool], tuple[bool]]:
        return (BufferPool, (self._pin,))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor like ``torch.empty``'s."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._pin:  # torch keeps page-locked memory in a pool of its own
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        if num_bytes < _SMALL_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.from_numpy(self._take(num_bytes)).view(dtype).view(tuple(shape))

    def _take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            idle = [i for i, count in enumerate(_references(self._buffers)) if count <= _WHEN_IDLE]
            fitting = [i for i in idle if len(self._buffers[i]) == num_bytes]
            taken = self._buffers[fitting[0]] if fitting else _aligned(num_bytes)
            surplus = [i for i in idle if i not in fitting[:1]][:-_MOST_IDLE]
            self._buffers = [buffer for i, buffer in enumerate(self._buffers) if i not in surplus]
            if not fitting:
                self._buffers.append(taken)
            return taken


def _aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Fresh memory at such an address."""
    fresh = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -fresh.ctypes.data % ALIGNMENT
    return fresh[start : start + num_bytes]


def _references(buffers: list[npt.NDArray[np.uint8]]) -> list[int]:
    """How many references there are to each, those of the asking included."""
    return [sys.getrefcount(buffer) for buffer in buffers]


_WHEN_IDLE = _references([np.empty(1, np.uint8)])[0]
"""What is counted of a buffer that only its list holds."""
