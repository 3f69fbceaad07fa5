"""The reads of a batch, several at a time.

A disk serves many requests as quickly as one, and a single thread that copies does not use all of a memory's
speed. So a batch's reads are shared between the thread that asks for it and a few others, on half of the cores that
a rank has: the others are the trainer's.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch.utils.data import get_worker_info

from latentry.hardware import num_cores, num_ranks

_MOST_THREADS = 8
_WORTHWHILE_BYTES = 1 << 22
"""Below that a batch is read before another thread has begun."""


class ReadThreads:
    """Threads for reading batches, the calling one among them; for callers in any number of threads."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or max(1, min(_MOST_THREADS, num_cores() // (2 * num_ranks())))
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def __reduce__(self) -> tuple[type[ReadThreads], tuple[int]]:
        return (ReadThreads, (self._num_threads,))

    def run(self, reads: Sequence[Callable[[], None]], num_bytes: int) -> None:
        """Do all of these reads, of so many bytes together; of several errors the first one's is raised."""
        waiting = deque(enumerate(reads))
        failures: dict[int, Exception] = {}

        def work() -> None:
            while waiting:
                try:
                    number, read = waiting.popleft()
                except IndexError:  # another thread was quicker
                    return
                try:
                    read()
                except Exception as error:
                    failures[number] = error

        helpers = self._helpers(work, len(reads), num_bytes)
        try:
            work()
        finally:
            waiting.clear()
            wait([helper for helper in helpers if not helper.cancel()])
        if failures:
            raise failures[min(failures)]

    def _helpers(self, work: Callable[[], None], num_reads: int, num_bytes: int) -> list[Future[None]]:
        count = min(self._num_threads, num_reads) - 1
        # A worker process has been given one core.
        if count < 1 or num_bytes < _WORTHWHILE_BYTES or get_worker_info() is not None:
            return []
        with self._lock:
            if self._pool is None or self._process != os.getpid():  # threads do not come along into a fork
                self._pool = ThreadPoolExecutor(self._num_threads - 1, thread_name_prefix="latentry-read")
                self._process = os.getpid()
            return [self._pool.submit(work) for _ in range(count)]
