"""Encode the captions of a task: each distinct caption once, in batches, when the first sample needs it.

Samples share a caption's embedding, and it is dropped after the last of them, so memory does not grow with the task.
Which captions share a batch depends on the whole task, also if the run resumes in the middle of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from latentry.encode.running.device import copy_to_host, to_host, with_smaller_batches_on_oom
from latentry.processors.base import Fields, Processor, StackedFields
from latentry.types import PlannedSample

TEXT_BATCH_SIZE = 32
"""How many captions are encoded together."""
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
        processor: Encodes the captions.
        samples: The samples of the task, in the order in which they will be encoded.
        num_finished: How many of the first samples need no caption, because an interrupted run has encoded them.
    """

    def __init__(self, processor: Processor, samples: Sequence[PlannedSample], num_finished: int = 0) -> None:
        self._processor = processor
        self._uses = Counter(text for sample in samples[num_finished:] for text in sample.caption.texts)
        captions = list(dict.fromkeys(text for sample in samples for text in sample.caption.texts))
        starts = range(0, len(captions), TEXT_BATCH_SIZE)
        batches = [captions[start : start + TEXT_BATCH_SIZE] for start in starts]
        self._batch_of = {caption: batch for batch in batches for caption in batch}
        self._encoded: dict[str, EncodedCaption] = {}

    def take(self, caption: str) -> EncodedCaption:
        """The embedding for one sample. Encodes the batch of this caption if it is not encoded yet."""
        if caption not in self._encoded:
            self._encode(self._batch_of[caption])
        taken = self._encoded[caption]
        self.drop(caption)
        return taken

    def drop(self, caption: str) -> None:
        """Give up one sample's claim to this caption, for example because its file cannot be read."""
        self._uses[caption] -= 1
        if not self._uses[caption]:
            self._encoded.pop(caption, None)

    def _encode(self, batch: list[str]) -> None:
        columns = with_smaller_batches_on_oom(self._processor.encode_texts, batch)
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
