"""Writing the samples of one task: a file for each, or shards with many samples.

A writer takes a task's samples in order and works in threads. Its rows are complete when everything is on disk.
The same samples always give the same bytes, whether all of them are added or the first ones are restored from a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from latentry.cache.format import PACKED, Row
from latentry.cache.write.file_writer import FileWriter
from latentry.cache.write.packed_writer import PackedWriter
from latentry.cache.write.sample_data import SampleData
from latentry.types import Bucket


class RowsToCome(Protocol):
    """Rows that are complete when their samples are on disk."""

    def done(self) -> bool:
        """Whether everything is on disk, or has failed."""

    def result(self) -> list[Row]:
        """The complete rows, in order. Waits until everything is on disk."""


class TaskWriter(Protocol):
    """Writes the samples of one task."""

    def restore(self, rows: Sequence[Row]) -> None:
        """Take the first samples, which an interrupted run has stored. Call it before ``add``."""

    def add(self, name: str, row: Row, data: SampleData) -> None:
        """Take a sample: its name, its row without storage fields, and its dictionary. May wait for earlier ones."""

    def store(self) -> RowsToCome:
        """Begin to store everything that was added so far, and return its rows. More samples may be added."""

    def finish(self) -> None:
        """Announce that no more samples will come."""

    def done(self) -> bool:
        """Whether everything is on disk, or has failed."""

    def rows(self) -> list[Row]:
        """The complete rows, in order. Waits until everything is on disk."""


@dataclass(frozen=True)
class WriterThreads:
    """The thread pools of all writers."""

    many: ThreadPoolExecutor
    single: ThreadPoolExecutor

    @classmethod
    @contextmanager
    def running(cls, count: int) -> Iterator[WriterThreads]:
        """Thread pools that finish their work at the end of the block, or drop what is queued after an error."""
        threads = cls(ThreadPoolExecutor(count), ThreadPoolExecutor(1))
        try:
            yield threads
        except BaseException:
            # Wait for writes in progress: nothing may appear in a folder that is no longer locked.
            for pool in (threads.many, threads.single):
                pool.shutdown(cancel_futures=True)
            raise
        threads.many.shutdown()
        threads.single.shutdown()


def task_writer(
    output: Path, output_format: str, bucket: Bucket, stem: str, threads: WriterThreads
) -> TaskWriter:
    """A writer for one task. All its samples have the same bucket; ``stem`` begins the names of its shards."""
    if output_format == PACKED:
        return PackedWriter(output, bucket.folder, stem, threads.single)
    return FileWriter(output / bucket.folder, output_format, threads.many)
