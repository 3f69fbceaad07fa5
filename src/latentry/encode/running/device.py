"""How a process shares its device and its cores: copies to main memory, and thread counts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_SWITCH_INTERVAL_S = 1e-4


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to main memory; from CUDA to pinned memory without waiting, from other GPUs with waiting.

    A tensor in main memory is returned as it is.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Like ``to_host``, but always a copy: the result shares no memory with the tensor."""
    return tensor.clone() if tensor.device.type == "cpu" else to_host(tensor)


def single_threaded_pool(num_threads: int) -> ThreadPoolExecutor:
    """A pool whose threads each run torch on one thread, because the pool already has a thread for each core.

    A new thread takes its torch thread count from a process-wide value when it first needs it. So each thread of the
    pool sets that value and reads it, and then the calling thread's count is restored.
    """
    before = torch.get_num_threads()
    started = threading.Barrier(num_threads + 1)

    def start() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()

    pool = ThreadPoolExecutor(num_threads, initializer=start)
    try:
        for _ in range(num_threads):
            pool.submit(started.wait)
        started.wait()
    except BaseException:
        started.abort()
        pool.shutdown(wait=False)
        raise
    finally:
        torch.set_num_threads(before)
    return pool


class _Feeding:
    """How many runs feed a GPU in this process, and the settings from before the first of them."""

    lock = threading.RLock()  # an abandoned generator may be collected while its thread holds the lock
    num_runs = 0
    switch_interval_s = 0.0
    num_threads = 0


@contextmanager
def gpu_feeding_priority() -> Iterator[None]:
    """Let the calling thread get the GIL and the cores it needs to keep a GPU busy.

    The thread needs the GIL hundreds of times per batch, and two dozen reading and writing threads hold it for up to
    the switch interval each, which is 5 ms by default. Inside the context it is 0.1 ms.

    Torch runs on one thread inside the context. With several, each copy of an image waits for the slowest thread, which
    waits for a core that is busy decoding: ten milliseconds per image.

    Both settings belong to the process. They are restored when the last context ends, in whatever order contexts end,
    also by an exception or because the generator that holds the context is closed or collected.
    """
    with _Feeding.lock:
        if _Feeding.num_runs == 0:
            _Feeding.switch_interval_s, _Feeding.num_threads = (
                sys.getswitchinterval(),
                torch.get_num_threads(),
            )
        _Feeding.num_runs += 1
    try:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        torch.set_num_threads(1)
        yield
    finally:
        with _Feeding.lock:
            _Feeding.num_runs -= 1
            # Torch's count is set per thread, so each context restores that of its own thread.
            torch.set_num_threads(_Feeding.num_threads)
            if _Feeding.num_runs == 0:
                sys.setswitchinterval(_Feeding.switch_interval_s)
