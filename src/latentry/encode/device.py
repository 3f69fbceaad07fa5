"""Between a device and the threads of its process: copies that wait for nothing, memory that is too small, and who
gets the cores.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from latentry.errors import RunError
from latentry.processors import Columns

_SWITCH_INTERVAL_S = 1e-4


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in main memory, without waiting for it; there is nothing to do for what is there already."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same in main memory, and in memory of its own."""
    return to_host(tensor) if tensor.is_cuda else tensor.clone()


def in_halves(call: Callable[[Any], Columns], batch: Any) -> Columns:
    """``call(batch)``; where the device's memory is too small for that, of its halves."""
    try:
        return call(batch)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise RunError(
                "the device's memory is too small for a single sample; use a larger device"
            ) from None
    # Only now: while an exception is handled it keeps what was computed so far in memory.
    torch.cuda.empty_cache()
    half = len(batch) // 2
    first, second = in_halves(call, batch[:half]), in_halves(call, batch[half:])
    return {key: torch.cat([column, second[key]]) for key, column in first.items()}


def single_threads(count: int) -> ThreadPoolExecutor:
    """Threads in which torch uses no further ones: there is one for each core already.

    Torch takes a thread's number from a common one when the thread first asks for it, so each sets it and asks;
    then the common one is set again for the calling thread.
    """
    usual = torch.get_num_threads()
    started = threading.Barrier(count + 1)

    def start() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()

    pool = ThreadPoolExecutor(count, initializer=start)
    try:
        for _ in range(count):
            pool.submit(started.wait)
        started.wait()
    except BaseException:
        started.abort()
        pool.shutdown(wait=False)
        raise
    finally:
        torch.set_num_threads(usual)
    return pool


@contextmanager
def feeding_a_gpu() -> Iterator[None]:
    """Let the thread that feeds a GPU wait for nothing else.

    It asks for Python's lock hundreds of times a batch, and two dozen threads that read and write hold it for up to
    five milliseconds each unless told otherwise. And where torch divides its work among threads it waits for the
    last of them, which waits for a core that is busy decoding: ten milliseconds for each picture it copies.
    """
    switch_interval, num_threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_interval)
        torch.set_num_threads(num_threads)
