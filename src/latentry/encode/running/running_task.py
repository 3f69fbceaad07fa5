"""A task in progress: what is finished of it, and its checkpoints.

A checkpoint ends where a batch ends. Batches are formed from the samples of a task in order, so a run that continues
there forms the same batches as one that was never interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from latentry.cache.write.commits import Checkpoint, Commit
from latentry.cache.write.task_writer import RowsToCome, TaskWriter
from latentry.encode.running.caption_batches import CaptionBatches
from latentry.types import Failure, PlannedSample, Task


@dataclass
class RunningTask:
    """A task in progress."""

    task: Task
    writer: TaskWriter
    captions: CaptionBatches
    batch_size: int
    failures: list[Failure] = field(default_factory=list)
    num_settled: int = 0
    """How many of the first samples are encoded or have failed, up to the end of a batch."""
    num_rows: int = 0
    """How many of them the writer has."""
    saved_at_s: float | None = None
    """When the last checkpoint began, or the first batch."""
    _num_saved: int = 0
    _saving: tuple[Checkpoint, int, RowsToCome] | None = None
    """A checkpoint without rows, their number, and the rows that are being written."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue after the checkpoint of an interrupted run."""
        self.writer.restore(checkpoint.rows)
        self.failures = list(checkpoint.failures)
        self.num_settled, self.num_rows = checkpoint.num_samples, len(checkpoint.rows)

    def settle(self, last: PlannedSample, num_rows: int) -> None:
        """Record the end of a batch.

        Args:
            last: The last sample of the batch.
            num_rows: How many samples of the batch were given to the writer.
        """
        while self.task.samples[self.num_settled] is not last:
            self.num_settled += 1
        self.num_settled += 1
        self.num_rows += num_rows

    def begin_checkpoint(self, now_s: float) -> None:
        """Begin to store everything that is settled, unless an earlier checkpoint is still being written."""
        if self._saving is not None:
            return
        self.saved_at_s = now_s
        names = {sample.name for sample in self.task.samples[: self.num_settled]}
        failures = tuple(failure for failure in self.failures if failure.name in names)
        without_rows = Checkpoint(self.task.id, (), failures, self.num_settled)
        self._saving = (without_rows, self.num_rows, self.writer.store())

    def finished_checkpoint(self, *, wait: bool = False) -> Checkpoint | None:
        """The checkpoint that was begun, once everything in it is on disk.

        Args:
            wait: Wait until it is.
        """
        if self._saving is None or not (wait or self._saving[2].done()):
            return None
        (checkpoint, num_rows, rows), self._saving = self._saving, None
        self._num_saved = checkpoint.num_samples
        return Checkpoint(
            checkpoint.task_id, tuple(rows.result()[:num_rows]), checkpoint.failures, checkpoint.num_samples
        )

    def last_checkpoint(self) -> Checkpoint | None:
        """A checkpoint of everything that is settled, when the run stops. None if there is nothing new."""
        self._saving = None
        if self.num_settled <= max(self._num_saved, self.task.num_finished):
            return None
        self.begin_checkpoint(0.0)
        return self.finished_checkpoint(wait=True)

    def commit(self) -> Commit:
        """The task's outcome. Waits until everything is on disk."""
        return Commit(self.task.id, tuple(self.writer.rows()), tuple(self.failures))
