"""The order of samples: permutations and the epoch's schedule, as pure functions of integers.

Any batch is computed directly, without iterating. Arithmetic gives the bucket of step k, and one lookup in a
permutation gives its samples. Two kinds of permutation trade memory for compatibility:

- Up to ``RANDPERM_LIMIT`` samples: ``torch.randperm`` from one generator, bucket after bucket, because existing
  training runs have that order. The permutations of earlier buckets are drawn first. Each takes 4 bytes per sample;
  only the current bucket's is kept, or those of all buckets if they are interleaved.
- Above: a keyed bijection. A Feistel network computes each entry separately, in constant memory, in about 0.2 µs.

Any change that changes an order must change ``ORDER_VERSION`` too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from latentry.seeds import derived_seed

ORDER_VERSION = 1
RANDPERM_LIMIT = 1 << 20
"""Buckets with more samples than this are permuted by the keyed bijection."""

_FEISTEL_ROUNDS = 8
_CHUNK_STEPS = 1 << 14
"""Interleaved epochs are shuffled in chunks of about this many steps (see ``InterleavedSchedule``)."""

Indices = npt.NDArray[np.int64]


class FeistelPermutation:
    """A permutation of ``range(size)`` whose entries are computed, never stored.

    >>> sorted(FeistelPermutation(5, key=1)(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]

    The network permutes all numbers of ``(size - 1).bit_length()`` bits, split into two halves that may differ by a
    bit. A result that is not below ``size`` is permuted again until it is (cycle walking). At least half of the
    results are below ``size`` at the first attempt.
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        bits = (size - 1).bit_length()
        self._right_bits = np.uint64(bits - bits // 2)
        self._left_mask = np.uint64((1 << (bits // 2)) - 1)
        self._right_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._round_keys = [np.uint64(derived_seed(key, "round", i)) for i in range(_FEISTEL_ROUNDS)]

    def __call__(self, positions: Indices) -> Indices:
        values = self._scramble(positions.astype(np.uint64))
        while (outside := np.flatnonzero(values >= self.size)).size:
            values[outside] = self._scramble(values[outside])
        return values.astype(np.int64)

    def _scramble(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._right_bits, values & self._right_mask
        for i, key in enumerate(self._round_keys):
            if i % 2 == 0:
                left = left ^ (_mix(right + key) & self._left_mask)
            else:
                right = right ^ (_mix(left + key) & self._right_mask)
        scrambled: npt.NDArray[np.uint64] = (left << self._right_bits) | right
        return scrambled


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread every input bit over all 64 output bits (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values = values ^ (values >> np.uint64(31))
    return values


class EpochPermutations:
    """The epoch's order of buckets, and the order of samples in each bucket, drawn on first use.

    A bucket's ``randperm`` depends on the draws before it, so reaching a bucket costs at most the permutations of the
    buckets before it. The generator's state at each bucket is kept, so returning to a bucket costs one permutation.

    Args:
        sizes: Samples per bucket.
        seed: The sampler's seed.
        epoch: The epoch.
        shuffle_buckets: Whether buckets are permuted.
        shuffle_within_bucket: Whether the samples of a bucket are permuted.
        keep: How many permutations stay in memory.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        seed: int,
        epoch: int,
        shuffle_buckets: bool,
        shuffle_within_bucket: bool,
        keep: int = 1,
    ) -> None:
        self._sizes = sizes
        self._key = (seed, epoch)
        self._shuffle = shuffle_within_bucket
        self._keep = keep
        self._kept: dict[int, npt.NDArray[np.int32]] = {}
        generator = torch.Generator()
        generator.manual_seed(seed + epoch)
        self.bucket_sequence = list(range(len(sizes)))
        if shuffle_buckets:
            self.bucket_sequence = torch.randperm(len(sizes), generator=generator).tolist()
        self._generator = generator
        self._drawn = [b for b in self.bucket_sequence if self._shuffle and sizes[b] <= RANDPERM_LIMIT]
        self._state_before: dict[int, torch.Tensor] = {}
        if self._drawn:
            self._state_before[self._drawn[0]] = generator.get_state()

    def take(self, bucket: int, positions: Indices) -> Indices:
        """The samples at these positions of the bucket's order, as positions within the bucket."""
        if not self._shuffle:
            return positions
        if (size := self._sizes[bucket]) > RANDPERM_LIMIT:
            return FeistelPermutation(size, derived_seed(*self._key, "bucket", bucket))(positions)
        if bucket not in self._kept:
            self._draw_until(bucket)
        return self._kept[bucket][positions].astype(np.int64)

    def _draw_until(self, bucket: int) -> None:
        turn = self._drawn.index(bucket)
        known = max(i for i in range(turn + 1) if self._drawn[i] in self._state_before)
        self._generator.set_state(self._state_before[self._drawn[known]])
        for i in range(known, turn + 1):
            drawn = torch.randperm(self._sizes[self._drawn[i]], generator=self._generator)
            if i + 1 < len(self._drawn):
                self._state_before[self._drawn[i + 1]] = self._generator.get_state()
            if i == turn or self._keep > 1:
                self._kept[self._drawn[i]] = drawn.numpy().astype(np.int32)
        while len(self._kept) > self._keep:
            del self._kept[next(b for b in self._kept if b != bucket)]


@dataclass(frozen=True)
class Segment:
    """The part of an epoch that runs with one number of ranks and one set of batch sizes.

    An epoch without a resume is one segment. Resuming with another number of ranks or other batch sizes begins a new
    segment over the samples that the earlier ones left.
    """

    sizes: tuple[int, ...]
    """Samples per bucket, in the dataset's order of buckets."""
    batch_sizes: tuple[int, ...]
    """Samples per batch and rank, for each bucket."""
    num_replicas: int
    drop_last: bool
    bucket_order: str = "sequential"
    first_batch: int = 0
    """The number of batches in the earlier segments."""
    consumed: tuple[int, ...] = field(default=())
    """Positions of each bucket's order that the earlier segments used; empty for none."""

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first position of each bucket's order that belongs to this segment."""
        return self.consumed or (0,) * len(self.sizes)

    @cached_property
    def samples_per_rank(self) -> tuple[int, ...]:
        """Samples of each bucket for each rank, after padding to a multiple of the ranks."""
        return tuple(
            -(-max(0, size - start) // self.num_replicas)
            for size, start in zip(self.sizes, self.starts, strict=True)
        )

    @cached_property
    def num_batches(self) -> tuple[int, ...]:
        """Batches of each bucket; the same on every rank."""
        return tuple(
            per_rank // batch if self.drop_last else -(-per_rank // batch)
            for per_rank, batch in zip(self.samples_per_rank, self.batch_sizes, strict=True)
        )

    @cached_property
    def total_batches(self) -> int:
        return sum(self.num_batches)

    @property
    def end_batch(self) -> int:
        """The number of batches of the epoch up to the end of this segment."""
        return self.first_batch + self.total_batches

    def left_out(self, bucket: int) -> int:
        """Samples of this bucket that ``drop_last`` leaves out."""
        used = self.num_batches[bucket] * self.batch_sizes[bucket] * self.num_replicas
        return max(0, self.sizes[bucket] - self.starts[bucket] - used)

    def batch_length(self, bucket: int, batch: int) -> int:
        """Samples for each rank in batch number ``batch`` of this bucket and segment."""
        size = self.batch_sizes[bucket]
        return min(size, self.samples_per_rank[bucket] - batch * size)

    def positions(self, bucket: int, batch: int, rank: int) -> Indices:
        """The positions in the bucket's order of this rank's samples of a batch.

        The ranks together take a contiguous run. A run past the end continues at the beginning: that is the padding
        that gives every rank the same number of samples.
        """
        count = self.batch_length(bucket, batch)
        within_segment = (batch * self.batch_sizes[bucket] + np.arange(count)) * self.num_replicas + rank
        return (self.starts[bucket] + within_segment) % self.sizes[bucket]

    def consumed_after(self, batches_done: Sequence[int]) -> tuple[int, ...]:
        """Positions of each bucket's order that are used after this many of its batches.

        A completed bucket is used up: the samples that ``drop_last`` left out of it stay out.
        """
        if 0 < sum(batches_done) == self.total_batches:
            return self.sizes
        return tuple(
            size if 0 < done == total else min(size, start + done * batch * self.num_replicas)
            for size, start, done, total, batch in zip(
                self.sizes, self.starts, batches_done, self.num_batches, self.batch_sizes, strict=True
            )
        )


class SequentialSchedule:
    """All batches of one bucket, then all of the next, in the epoch's bucket order."""

    def __init__(self, segment: Segment, bucket_sequence: Sequence[int]) -> None:
        self._sequence = bucket_sequence
        self._num_batches = segment.num_batches
        self._ends = np.cumsum([segment.num_batches[b] for b in bucket_sequence]).tolist()

    def locate(self, step: int) -> tuple[int, int]:
        """The bucket of this step of the segment, and the number of the batch within the bucket."""
        turn = bisect_right(self._ends, step)
        bucket = self._sequence[turn]
        return bucket, step - (self._ends[turn] - self._num_batches[bucket])

    def batches_done(self, step: int) -> list[int]:
        """The number of batches of each bucket before this step."""
        done = [0] * len(self._num_batches)
        for bucket, end in zip(self._sequence, self._ends, strict=True):
            count = self._num_batches[bucket]
            done[bucket] = min(count, max(0, step - (end - count)))
        return done


class InterleavedSchedule:
    """Buckets in random order: each next one is drawn in proportion to the batches it has left.

    That equals shuffling a list with one label per batch. Up to about 16,000 steps the whole list is shuffled. Longer
    epochs are cut into chunks that each hold the exact share of every bucket and are shuffled separately, so any step
    is computed in a fraction of a millisecond.
    """

    def __init__(self, segment: Segment, *, seed: int, epoch: int) -> None:
        self._num_batches = np.array(segment.num_batches, dtype=np.int64)
        self._total = segment.total_batches
        self._num_chunks = max(1, -(-self._total // _CHUNK_STEPS))
        self._key = (seed, epoch, "interleave", segment.first_batch)
        self._cached: tuple[int, Indices, Indices] | None = None

    def locate(self, step: int) -> tuple[int, int]:
        chunk, offset = self._chunk_of(step)
        labels, ranks = self._labels(chunk)
        bucket = int(labels[offset])
        return bucket, int(self._before(chunk)[bucket] + ranks[offset])

    def batches_done(self, step: int) -> list[int]:
        if step >= self._total:
            return [int(count) for count in self._num_batches]
        chunk, offset = self._chunk_of(step)
        labels, _ = self._labels(chunk)
        within = np.bincount(labels[:offset], minlength=len(self._num_batches))
        return [int(count) for count in self._before(chunk) + within]

    def _before(self, chunk: int) -> Indices:
        """Batches of each bucket in the chunks before this one."""
        return self._num_batches * chunk // self._num_chunks

    def _chunk_of(self, step: int) -> tuple[int, int]:
        chunk = step * self._num_chunks // self._total  # off by one at most: shares are rounded
        while self._before(chunk).sum() > step:
            chunk -= 1
        while self._before(chunk + 1).sum() <= step:
            chunk += 1
        return chunk, step - int(self._before(chunk).sum())

    def _labels(self, chunk: int) -> tuple[Indices, Indices]:
        """The bucket at each step of the chunk, and how often that bucket came before within the chunk."""
        if self._cached is None or self._cached[0] != chunk:
            shares = self._before(chunk + 1) - self._before(chunk)
            generator = torch.Generator()
            generator.manual_seed(derived_seed(*self._key, chunk))
            shuffle = torch.randperm(int(shares.sum()), generator=generator).numpy()
            labels = np.repeat(np.arange(len(shares)), shares)[shuffle]
            ranks = np.empty_like(labels)
            ranks[np.argsort(labels, kind="stable")] = np.concatenate([np.arange(n) for n in shares])
            self._cached = (chunk, labels, ranks)
        return self._cached[1], self._cached[2]
