"""One epoch in order: which samples each of its batches has."""

from __future__ import annotations

from dataclasses import dataclass

from latentry.serve.order import (
    EpochPermutations,
    Indices,
    InterleavedSchedule,
    Segment,
    SequentialSchedule,
)
from latentry.serve.sample_index import caption_draw

BUCKET_ORDERS = ("sequential", "interleaved")


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """What decides the permutations of an epoch, beside its buckets."""

    seed: int
    shuffle_buckets: bool
    shuffle_within_bucket: bool


class EpochOrder:
    """The samples of each batch of one epoch, within one segment."""

    def __init__(self, segment: Segment, epoch: int, settings: OrderSettings) -> None:
        interleaved = segment.bucket_order == "interleaved"
        self.segment = segment
        self.caption_draw = caption_draw(settings.seed, epoch)
        """The number that the captions of this epoch are drawn with."""
        self._permutations = EpochPermutations(
            segment.sizes,
            seed=settings.seed,
            epoch=epoch,
            shuffle_buckets=settings.shuffle_buckets,
            shuffle_within_bucket=settings.shuffle_within_bucket,
            keep=len(segment.sizes) if interleaved else 1,
        )
        self._schedule: SequentialSchedule | InterleavedSchedule = (
            InterleavedSchedule(segment, seed=settings.seed, epoch=epoch)
            if interleaved
            else SequentialSchedule(segment, self._permutations.bucket_sequence)
        )

    def bucket_and_batch(self, step: int) -> tuple[int, int]:
        """The bucket of a batch of the epoch, and the number of the batch within the bucket and segment."""
        return self._schedule.locate(step - self.segment.first_batch)

    def bucket_and_samples(self, step: int, rank: int) -> tuple[int, Indices]:
        """The bucket of a batch of the epoch, and this rank's samples as positions within the bucket."""
        bucket, batch = self.bucket_and_batch(step)
        return bucket, self._permutations.take(bucket, self.segment.positions(bucket, batch, rank))

    def consumed_after(self, step: int) -> tuple[int, ...]:
        """Positions of each bucket's order that are used after this many batches of the epoch."""
        return self.segment.consumed_after(self._schedule.batches_done(step - self.segment.first_batch))
