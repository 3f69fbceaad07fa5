"""Encode the captions of tasks: each distinct caption of a task once, in batches, when the first sample needs it.

Samples share a caption's embedding, and it is dropped after the last of them, so memory does not grow with the task.
Which captions share a batch depends on the whole task, also if the run resumes in the middle of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import NamedTuple

import torch

from latentry.encode.running.device import copy_to_host, to_host
from latentry.encode.running.memory import WithinMemory
from latentry.hardware import main_memory
from latentry.processors.base import Fields, Processor, StackedFields
from latentry.processors.memory.plan import TEXT_BATCH_SIZE
from latentry.types import PlannedSample, Task

CaptionBatch = tuple[str, ...]
"""Captions that are encoded together."""
_SMALL_BYTES = 1 << 22
"""StackedFields up to this size are copied from the device in one piece, for all captions of a batch."""


class EncodedCaption(NamedTuple):
    """One caption's embedding, which may still be on its way to main memory."""

    fields: Fields
    batch_is_finite: _FiniteRows
    row: int

    @property
    def is_finite(self) -> bool:
        """Whether all its numbers are finite. Ask only when the device has finished."""
        return self.batch_is_finite[self.row]


class _FiniteRows:
    """Tells for each caption of a batch whether its numbers are finite.

    The device computes the answers with the batch. They are read when first asked for, once per batch.
    """

    def __init__(self, columns: StackedFields) -> None:
        rows = [torch.isfinite(c.flatten(1)).all(dim=1) for c in columns.values() if c.is_floating_point()]
        self._flags = to_host(torch.stack(rows).all(dim=0)) if rows else None

    @cached_property
    def _values(self) -> list[bool] | None:
        return None if self._flags is None else self._flags.tolist()

    def __getitem__(self, row: int) -> bool:
        return self._values is None or self._values[row]


class CaptionBatches:
    """The embeddings of a task's captions.

    Each sample either takes the embeddings of its captions or drops its claim to them, exactly once.

    Args:
        samples: The samples of the task, in the order in which they will be encoded.
        num_finished: How many of the first samples need no caption, because an interrupted run has encoded them.
    """

    def __init__(self, samples: Sequence[PlannedSample], num_finished: int) -> None:
        self._uses = Counter(text for sample in samples[num_finished:] for text in sample.caption.texts)
        captions = list(dict.fromkeys(text for sample in samples for text in sample.caption.texts))
        batches = [
            tuple(captions[start : start + TEXT_BATCH_SIZE])
            for start in range(0, len(captions), TEXT_BATCH_SIZE)
        ]
        self._batch_of = {caption: batch for batch in batches for caption in batch}
        self._not_encoded = dict.fromkeys(batches)
        self._encoded: dict[str, EncodedCaption] = {}

    def take(self, caption: str) -> EncodedCaption:
        """The embedding for one sample, once it is stored."""
        taken = self._encoded[caption]
        self.drop(caption)
        return taken

    def drop(self, caption: str) -> None:
        """Give up one sample's claim to this caption, for example because its file cannot be read."""
        self._uses[caption] -= 1
        if not self._uses[caption]:
            self._encoded.pop(caption, None)

    def has(self, caption: str) -> bool:
        """Whether the embedding is stored."""
        return caption in self._encoded

    def batch_of(self, caption: str) -> CaptionBatch:
        """The captions that are encoded together with this one."""
        return self._batch_of[caption]

    def not_encoded(self) -> list[CaptionBatch]:
        """The batches that samples still need, in order."""
        return [batch for batch in self._not_encoded if any(self._uses[caption] for caption in batch)]

    def store(self, batch: CaptionBatch, columns: StackedFields) -> int:
        """Copy the embeddings of a batch to main memory, and return their size in bytes.

        Args:
            batch: The captions.
            columns: Their embeddings.
        """
        self._not_encoded.pop(batch, None)
        finite = _FiniteRows(columns)
        small = {key: to_host(column) for key, column in columns.items() if column.nbytes <= _SMALL_BYTES}
        for i, caption in enumerate(batch):
            if not self._uses[caption]:
                continue
            # Large columns are copied row by row: a caption that stays in memory must not keep the others there.
            fields = {
                key: small[key][i : i + 1] if key in small else copy_to_host(column[i : i + 1])
                for key, column in columns.items()
            }
            self._encoded[caption] = EncodedCaption(fields, finite, i)
        return sum(column.nbytes for column in columns.values())


class CaptionPasses:
    """Decides how many captions are encoded at a time.

    If the text encoders stay on the device, a batch is encoded when the first sample needs it. If they take turns with
    the VAE, one pass encodes the captions of many samples, of the tasks after this one too, up to a share of the main
    memory. Which captions form a batch is the same in both cases, and so are the embeddings.

    Args:
        processor: Encodes the captions.
        memory: Handles running out of device memory.
        max_samples_ahead: How many samples of tasks that have not begun a pass may take, so that other workers have
            something to do.
    """

    def __init__(self, processor: Processor, memory: WithinMemory, max_samples_ahead: int) -> None:
        self._processor = processor
        self._memory = memory
        self._max_samples_ahead = max_samples_ahead
        self._tasks: Iterator[Task] = iter(())
        self._begun: deque[CaptionBatches] = deque()
        self._ahead: deque[tuple[Task, CaptionBatches]] = deque()
        """Tasks whose captions were encoded before the task has begun."""

    def begin(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, CaptionBatches]]:
        """The tasks in order, with their captions."""
        self._tasks = iter(tasks)
        while self._ahead or self._look_ahead():
            task, captions = self._ahead.popleft()
            self._begun.append(captions)
            yield task, captions

    def _look_ahead(self) -> bool:
        """Take one more task. False if there is none."""
        task = next(self._tasks, None)
        if task is not None:
            self._ahead.append((task, CaptionBatches(task.samples, task.num_finished)))
        return task is not None

    def take(self, captions: CaptionBatches, caption: str) -> EncodedCaption:
        """The embedding of a caption for one sample. Encodes its batch if that has not been done yet.

        Args:
            captions: The captions of the sample's task.
            caption: One of them.
        """
        while self._begun[0] is not captions:
            self._begun.popleft()  # a task's captions are all taken before those of the next one
        if not captions.has(caption):
            self._run(captions, caption)
        return captions.take(caption)

    def _run(self, captions: CaptionBatches, first: str) -> None:
        """Encode the batch of a caption, and all that follow in the same pass."""
        with ExitStack() as stack:
            self._memory.attempt(lambda: stack.enter_context(self._processor.text_pass()))
            num_bytes = self._encode(captions, captions.batch_of(first))
            if not self._processor.takes_turns:
                return
            limit = caption_memory()
            for following in self._following():
                for batch in following.not_encoded():
                    if num_bytes >= limit:
                        return
                    num_bytes += self._encode(following, batch)

    def _following(self) -> Iterator[CaptionBatches]:
        """The captions of the current task and of those after it."""
        yield from self._begun
        number = num_samples = 0
        while num_samples < self._max_samples_ahead and (number < len(self._ahead) or self._look_ahead()):
            task, captions = self._ahead[number]
            yield captions
            number, num_samples = number + 1, num_samples + len(task.samples)

    def _encode(self, captions: CaptionBatches, batch: CaptionBatch) -> int:
        return captions.store(batch, self._memory.call(self._processor.encode_texts, list(batch)))


def caption_memory() -> int:
    """How many bytes of embeddings a pass may leave in main memory: a sixteenth of it, at most 4 GB."""
    return int(min(4 << 30, main_memory() / 16))
