"""A small thread pool that reads the parts of a batch.

A disk serves many requests as fast as one, and a single copying thread does not use the full memory bandwidth. So the
reads of a batch are shared between the calling thread and a few others. They use at most half of a rank's cores: the
trainer needs the rest.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch.utils.data import get_worker_info

from latentry.hardware import num_cores, num_ranks

_MAX_THREADS = 8
_MIN_SHARED_BYTES = 1 << 22
"""A smaller batch is read before another thread has started."""


class ReadThreads:
    """Runs reads on several threads, including the calling one. Any number of threads may call it.

    Args:
        num_threads: How many threads read one batch. By default half of the cores that a rank has, at most 8.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or max(1, min(_MAX_THREADS, num_cores() // (2 * num_ranks())))
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def __reduce__(self) -> tuple[type[ReadThreads], tuple[int]]:
        return (ReadThreads, (self.num_threads,))

    def run(self, reads: Sequence[Callable[[], None]], num_bytes: int) -> None:
        """Run all reads, and return when all have ended. Raises the error of the first read that failed.

        Args:
            reads: Functions that each read one part.
            num_bytes: The size of all parts together. Small batches stay on the calling thread.
        """
        waiting = deque(enumerate(reads))
        failures: dict[int, Exception] = {}

        def work() -> None:
            while waiting:
                try:
                    number, read = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    read()
                except Exception as error:
                    failures[number] = error

        helpers = self._start_helpers(work, len(reads), num_bytes)
        try:
            work()
        finally:
            waiting.clear()
            wait([helper for helper in helpers if not helper.cancel()])
        if failures:
            raise failures[min(failures)]

    def _start_helpers(self, work: Callable[[], None], num_reads: int, num_bytes: int) -> list[Future[None]]:
        count = min(self.num_threads, num_reads) - 1
        # A worker process of PyTorch's DataLoader has one core.
        if count < 1 or num_bytes < _MIN_SHARED_BYTES or get_worker_info() is not None:
            return []
        with self._lock:
            if self._pool is None or self._process != os.getpid():  # a forked process has no threads
                self._pool = ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="latentry-read")
                self._process = os.getpid()
            return [self._pool.submit(work) for _ in range(count)]
