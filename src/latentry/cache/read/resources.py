"""What reading a batch needs beside the cache: memory to read into, and threads to read with."""

from __future__ import annotations

from dataclasses import dataclass, field

from latentry.cache.read.buffer_pool import BufferPool
from latentry.cache.read.read_threads import ReadThreads


@dataclass(frozen=True, slots=True)
class ReadResources:
    """A buffer pool and threads. Several threads may read with the same ones."""

    buffers: BufferPool = field(default_factory=BufferPool)
    """Where batches are read into."""
    threads: ReadThreads = field(default_factory=ReadThreads)
    """Threads that read a batch."""
