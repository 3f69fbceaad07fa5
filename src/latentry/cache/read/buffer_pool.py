"""Memory for batches, reused when the batch in it is no longer referenced.

The system takes back a buffer of several megabytes when it is freed, and clears and maps each page again for the next
batch. That costs as much as reading the data. A trainer holds one or two batches at a time, so a few buffers are
enough for a whole run.
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

_MAX_IDLE = 16
_MIN_POOLED_BYTES = 1 << 18


class BufferPool:
    """Allocates the tensors of batches. Several threads may use one pool.

    Args:
        pin_memory: Allocate pinned memory, for faster copies to a GPU. PyTorch has its own pool for it.
    """

    def __init__(self, pin_memory: bool = False) -> None:
        self.pin_memory = pin_memory
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[BufferPool], tuple[bool]]:
        return (BufferPool, (self.pin_memory,))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with undefined content, as from ``torch.empty``.

        Its memory is reused when no reference to the tensor or to a view of it is left.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.pin_memory:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        if num_bytes < _MIN_POOLED_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.from_numpy(self._take(num_bytes)).view(dtype).view(tuple(shape))

    def _take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            idle = [i for i, count in enumerate(_references(self._buffers)) if count <= _IDLE_REFERENCES]
            fitting = [i for i in idle if len(self._buffers[i]) == num_bytes]
            taken = self._buffers[fitting[0]] if fitting else _aligned(num_bytes)
            surplus = [i for i in idle if i not in fitting[:1]][:-_MAX_IDLE]
            self._buffers = [buffer for i, buffer in enumerate(self._buffers) if i not in surplus]
            if not fitting:
                self._buffers.append(taken)
            return taken


def _aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """New memory whose address is a multiple of ``ALIGNMENT``."""
    fresh = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -fresh.ctypes.data % ALIGNMENT
    return fresh[start : start + num_bytes]


def _references(buffers: list[npt.NDArray[np.uint8]]) -> list[int]:
    """The number of references to each buffer, including those that counting adds."""
    return [sys.getrefcount(buffer) for buffer in buffers]


_IDLE_REFERENCES = _references([np.empty(1, np.uint8)])[0]
"""The count for a buffer that only its list refers to."""
