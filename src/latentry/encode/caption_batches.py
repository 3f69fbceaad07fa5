"""The captions of a task on their way through the text encoders: each once, in batches, and no longer than needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from latentry.encode.device import copied, in_halves, to_host
from latentry.processors import Columns, Fields, Processor
from latentry.types import PlannedSample

TEXT_BATCH_SIZE = 32
"""Captions that are encoded together."""
_SMALL_BYTES = 1 << 22
"""What is no larger is copied from the device in one piece, for all captions of a batch."""


class Text(NamedTuple):
    """A caption's fields, on their way to main memory."""

    fields: Fields
    finite: Finite
    number: int
    """Its place in its batch."""


class Finite:
    """For each caption of a batch whether its numbers are finite; to be asked once they are in main memory."""

    def __init__(self, columns: Columns) -> None:
        rows = [torch.isfinite(c.flatten(1)).all(dim=1) for c in columns.values() if c.is_floating_point()]
        self._rows = to_host(torch.stack(rows).all(dim=0)) if rows else None

    @cached_property
    def _known(self) -> list[bool] | None:
        return None if self._rows is None else self._rows.tolist()

    def __getitem__(self, number: int) -> bool:
        return self._known is None or self._known[number]


class CaptionBatches:
    """The distinct captions of a task, each encoded once, in batches, as they are reached, and then let go."""

    def __init__(self, processor: Processor, samples: Sequence[PlannedSample]) -> None:
        self._processor = processor
        self._uses = Counter(sample.caption.text for sample in samples)
        self._waiting = list(self._uses)
        self._encoded: dict[str, Text] = {}

    def take(self, caption: str) -> Text:
        """What a sample with this caption gets."""
        while caption not in self._encoded:
            batch, self._waiting = self._waiting[:TEXT_BATCH_SIZE], self._waiting[TEXT_BATCH_SIZE:]
            columns = in_halves(self._processor.encode_texts, batch)
            finite = Finite(columns)
            small = {key: to_host(column) for key, column in columns.items() if column.nbytes <= _SMALL_BYTES}
            for i, text in enumerate(batch):
                # What is large in memory of its own: one caption that is kept does not keep the others.
                fields = {
                    key: small[key][i : i + 1] if key in small else copied(column[i : i + 1])
                    for key, column in columns.items()
                }
                self._encoded[text] = Text(fields, finite, i)
        taken = self._encoded[caption]
        self.drop(caption)
        return taken

    def drop(self, caption: str) -> None:
        """One sample with this caption less is to come."""
        self._uses[caption] -= 1
        if not self._uses[caption]:
            self._encoded.pop(caption, None)
