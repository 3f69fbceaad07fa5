"""How far a trainer is in an epoch, and which pass over the epoch counts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from latentry.serve.epoch_order import EpochOrder, OrderSettings
from latentry.serve.order import Indices, Segment
from latentry.serve.row_numbers import RowNumbers
from latentry.serve.sample_index import SampleIndex
from latentry.serve.sampler_state import Position

logger = logging.getLogger(__name__)


class EpochProgress:
    """The position within an epoch: where the next pass starts, and what the trainer has received.

    Args:
        whole_epoch: An epoch without a resume.
        settings: What decides its permutations.
        groups: The buckets, each with its ``indices``.
        rank: The rank whose samples are returned.
        draws_captions: Whether indices say which caption is read.
    """

    def __init__(
        self,
        whole_epoch: Segment,
        settings: OrderSettings,
        groups: Sequence[Mapping[str, Any]],
        rank: int,
        *,
        draws_captions: bool = False,
    ) -> None:
        self._whole_epoch = whole_epoch
        self._settings = settings
        self._groups = groups
        self._rank = rank
        self._draws_captions = draws_captions
        self._order: EpochOrder | None = None
        self._start = 0
        self._is_resuming = False
        self._iteration: EpochIteration | None = None
        self.position = Position(0, 0, whole_epoch)

    @property
    def order(self) -> EpochOrder:
        """The order of the current epoch."""
        if self._order is None:
            self._order = EpochOrder(self.position.segment, self.position.epoch, self._settings)
        return self._order

    def indices(self, step: int, order: EpochOrder | None = None) -> list[int]:
        """The rank's samples of a batch, counted from the beginning of the epoch."""
        order = order or self.order
        bucket, within_bucket = order.bucket_and_samples(step, self._rank)
        indices = _look_up(self._groups[bucket]["indices"], within_bucket)
        return [SampleIndex(idx, order.caption_draw) for idx in indices] if self._draws_captions else indices

    def begin_iteration(self) -> EpochIteration:
        """Begin a pass: after a loaded position the first time, otherwise at the beginning of the epoch."""
        if not self._is_resuming:
            self._move_to(Position(self.position.epoch, 0, self._whole_epoch))
        self._is_resuming = False
        self._receive(self._start)
        self._iteration = EpochIteration(self, self.order, self._start)
        return self._iteration

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; the current epoch keeps its position."""
        current = self.position
        if epoch == current.epoch:
            return
        if self._is_resuming and 0 < self._start < current.segment.end_batch:
            logger.warning(
                "set_epoch(%d) discards the loaded position, batch %d of epoch %d; to resume there, "
                "start the training loop at sampler.epoch",
                epoch,
                self._start,
                current.epoch,
            )
        self._move_to(Position(epoch, 0, self._whole_epoch))
        self._is_resuming = False

    def load(self, position: Position) -> None:
        """Go to a saved position.

        If the position is the end of the previous epoch, the current epoch starts at its beginning.
        """
        is_end = position.batches_received == position.segment.end_batch
        if is_end and position.epoch + 1 == self.position.epoch:
            position = Position(self.position.epoch, 0, self._whole_epoch)
        self._move_to(position)
        self._is_resuming = True

    def _move_to(self, position: Position) -> None:
        if (position.epoch, position.segment) != (self.position.epoch, self.position.segment):
            self._order = None
        self._iteration = None
        self.position = position
        self._start = position.batches_received

    def _receive(self, num_batches: int) -> None:
        self.position = Position(self.position.epoch, num_batches, self.position.segment)


class EpochIteration:
    """One pass over the rest of an epoch, begun by ``SequentialBucketSampler.begin_iteration``.

    >>> iteration = sampler.begin_iteration()
    >>> for step in iteration.steps:
    ...     train(read(iteration.indices(step)))
    ...     iteration.mark_received(step)

    ``indices`` only computes, so a loader can call it ahead of its trainer. ``mark_received`` moves the sampler's
    state. Only the newest iteration of a sampler is current: ``mark_received`` of an older one does nothing.
    """

    def __init__(self, progress: EpochProgress, order: EpochOrder, start: int) -> None:
        self._progress = progress
        self._order = order
        self.steps = range(start, order.segment.end_batch)
        """The numbers of the batches to come, counted from the beginning of the epoch."""

    @property
    def is_current(self) -> bool:
        """Whether the sampler has not begun another iteration, changed its epoch or loaded a state since."""
        return self._progress._iteration is self

    def indices(self, step: int) -> list[int]:
        """This rank's samples of a batch."""
        return self._progress.indices(step, self._order)

    def mark_received(self, step: int) -> None:
        """Count this batch, and those before it, as received by the trainer."""
        if self.is_current:
            self._progress._receive(step + 1)


def _look_up(indices: Any, positions: Indices) -> list[int]:
    """``[indices[p] for p in positions]``, fast for ranges, arrays and the datasets' own."""
    if isinstance(indices, (range, np.ndarray)):
        indices = RowNumbers(indices)
    if isinstance(indices, RowNumbers):
        return indices.look_up(positions)
    return [int(indices[position]) for position in positions]
