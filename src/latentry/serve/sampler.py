"""Which samples a rank trains on at each step: deterministic, resumable, alike on all ranks.

The sampler holds no list of batches. An epoch is (seed, epoch, bucket sizes, ranks), batch k is
computed from those, and the saved state is a few integers. So a resume is immediate anywhere in a
billion samples, and can go on with another number of ranks.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from latentry.buckets import MultiTierBucketCalculator
from latentry.errors import ConfigError, StateError
from latentry.serve.order import (
    ORDER_VERSION,
    EpochPermutations,
    Indices,
    InterleavedSchedule,
    Leg,
    SequentialSchedule,
)

logger = logging.getLogger(__name__)

STATE_VERSION = 1
BUCKET_ORDERS = ("sequential", "interleaved")


class BucketedDataset(Protocol):
    """All that the sampler asks of a dataset.

    Each group holds ``indices`` (a list, a numpy array or a ``range``), ``resolution``,
    ``pixels`` and ``aspect_name``. A ``fingerprint`` attribute, where there is one, is what a
    saved state is recognised by.
    """

    calculator: MultiTierBucketCalculator

    @property
    def sorted_bucket_keys(self) -> Sequence[Any]: ...
    @property
    def bucket_groups(self) -> Mapping[Any, Mapping[str, Any]]: ...


class SequentialBucketSampler(Sampler[list[int]]):
    """Batches of one bucket each, split over the ranks, every sample once an epoch.

    >>> sampler = SequentialBucketSampler(dataset, base_batch_size=8, num_replicas=2, rank=0)
    >>> sampler.set_epoch(3)
    >>> for indices in sampler: ...

    All ranks see the same bucket at every step and equally many batches: a bucket is padded by
    repetition to a multiple of the ranks. ``drop_last`` leaves out the incomplete batch at the
    end of each bucket and says once how much that is. ``bucket_order="interleaved"`` draws the
    next bucket at random in proportion to what each has left, instead of one after the other.
    """

    def __init__(
        self,
        dataset: BucketedDataset,
        base_batch_size: int = 32,
        base_resolution: tuple[int, int] = (512, 512),
        drop_last: bool = True,
        shuffle_buckets: bool = True,
        shuffle_within_bucket: bool = True,
        dynamic_batch_size: bool = False,
        seed: int = 42,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        bucket_order: str = "sequential",
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if distributed else 1
        if rank is None:
            rank = dist.get_rank() if distributed else 0
        for name, value in (("base_batch_size", base_batch_size), ("seed", seed), ("rank", rank)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number")
        if base_batch_size < 1:
            raise ConfigError(f"base_batch_size is {base_batch_size}; it must be at least 1")
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ConfigError(
                f"rank {rank} of {num_replicas} ranks: ranks run from 0 to one less than num_replicas"
            )
        if bucket_order not in BUCKET_ORDERS:
            raise ConfigError(
                f"unknown bucket_order {bucket_order!r}; choose one of {', '.join(BUCKET_ORDERS)}"
            )

        self.dataset = dataset
        self.base_batch_size = base_batch_size
        self.base_resolution = base_resolution
        self.drop_last = drop_last
        self.shuffle_buckets = shuffle_buckets
        self.shuffle_within_bucket = shuffle_within_bucket
        self.dynamic_batch_size = dynamic_batch_size
        self.seed = seed
        self.num_replicas = num_replicas
        self.rank = rank
        self.bucket_order = bucket_order
        self.counts_on_yield = True
        """Whether iterating moves the position. A loader that prefetches sets this to False, and calls
        ``begin_iteration`` and, for each batch it hands on, ``advance`` instead."""

        self.bucket_keys = list(dataset.sorted_bucket_keys)
        self.bucket_groups = dataset.bucket_groups
        self.calculator = dataset.calculator
        self._groups = [dataset.bucket_groups[key] for key in self.bucket_keys]
        self._whole_epoch = Leg(
            sizes=tuple(len(group["indices"]) for group in self._groups),
            batch_sizes=tuple(self._get_batch_size(tuple(group["resolution"])) for group in self._groups),
            num_replicas=num_replicas,
            drop_last=drop_last,
            bucket_order=bucket_order,
        )
        self._epoch = 0
        self._leg = self._whole_epoch
        self._order: _EpochOrder | None = None
        self._start = 0
        self._received = 0
        self._resumes = False
        self._iteration = 0
        self._fingerprint: str | None = None
        if rank == 0:
            self._report_left_out()

    # ---- the batches ------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so that the position to resume at is used up by the first batch that is drawn:
        # PyTorch's loader makes two iterators when it has workers, and draws from the second.
        iteration = self.begin_iteration() if self.counts_on_yield else None
        order = self._current_order()
        for step in range(self._start, len(self)):
            if iteration is not None:
                self.advance(iteration)
            yield self._samples(order, step)

    def begin_iteration(self) -> int:
        """Go to where the next iteration starts: behind a state just loaded, else at the beginning.

        Returns the iteration's number, to hand to ``advance``.
        """
        if not self._resumes:
            self._begin_epoch(self._epoch)
        self._resumes = False
        self._received = self._start
        self._iteration += 1
        return self._iteration

    def advance(self, iteration: int) -> None:
        """Count one more batch as received by the trainer, if that iteration is still the current one."""
        if iteration == self._iteration:
            self._received += 1

    def is_current(self, iteration: int) -> bool:
        """Whether no later iteration has begun."""
        return iteration == self._iteration

    def __len__(self) -> int:
        """Batches of this epoch on every rank, those before a resume included."""
        return self._calculate_total_batches()

    def get_batch(self, batch_idx: int) -> list[int]:
        """The samples of this rank's batch number ``batch_idx`` of the epoch, computed directly."""
        if not self._leg.first_batch <= batch_idx < len(self):
            raise IndexError(
                f"batch {batch_idx} of epoch {self.epoch}: there are batches {self._leg.first_batch} "
                f"to {len(self) - 1}"
            )
        return self._samples(self._current_order(), batch_idx)

    def get_batch_info(self, batch_idx: int) -> dict[str, Any]:
        """The bucket of batch ``batch_idx`` of this epoch, exactly; empty if there is no such batch.

        ``batch_size`` counts the samples that each rank gets in this very batch.
        """
        step = batch_idx - self._leg.first_batch
        if not 0 <= step < self._leg.total_batches:
            return {}
        bucket, batch = self._current_order().schedule.locate(step)
        group = self._groups[bucket]
        return {
            "bucket_key": self.bucket_keys[bucket],
            "resolution": group["resolution"],
            "batch_size": self._leg.batch_length(bucket, batch),
            "aspect_name": group["aspect_name"],
        }

    def _samples(self, order: _EpochOrder, batch_idx: int) -> list[int]:
        bucket, within_bucket = order.bucket_and_samples(batch_idx, self.rank)
        return _look_up(self._groups[bucket]["indices"], within_bucket)

    def _current_order(self) -> _EpochOrder:
        if self._order is None:
            self._order = _EpochOrder(self, self._leg)
        return self._order

    def _get_batch_size(self, resolution: tuple[int, int]) -> int:
        """The batch size for a resolution: fixed, or scaled to hold about as many pixels."""
        if not self.dynamic_batch_size:
            return self.base_batch_size
        return self.calculator.get_dynamic_batch_size(resolution, self.base_batch_size, self.base_resolution)

    def _calculate_total_batches(self) -> int:
        """The epoch's batches, the same on all ranks because every bucket is padded to their number."""
        return self._leg.first_batch + self._leg.total_batches

    @property
    def left_out(self) -> dict[Any, int]:
        """How many samples ``drop_last`` leaves out of each bucket, where it does."""
        counts = (self._whole_epoch.left_out(bucket) for bucket in range(len(self._groups)))
        return {key: count for key, count in zip(self.bucket_keys, counts, strict=True) if count}

    def _report_left_out(self) -> None:
        if not (left_out := self.left_out):
            return
        by_bucket = ", ".join(f"{_bucket_name(key)}: {count}" for key, count in left_out.items())
        logger.warning(
            "drop_last leaves out %d of %d samples in every epoch, by bucket: %s%s",
            sum(left_out.values()),
            sum(self._whole_epoch.sizes),
            by_bucket,
            "" if len(self) else "; that is all of them: no batch is left",
        )

    # ---- epochs and state -------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch whose shuffle is in force; assigning it is ``set_epoch``."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to this epoch's shuffle. Naming the epoch of a state just loaded keeps its position."""
        if epoch == self._epoch:
            return
        if self._resumes and 0 < self._start < len(self):
            logger.warning(
                "set_epoch(%d) gives up the loaded position, batch %d of epoch %d; to go on there, "
                "begin the training loop at sampler.epoch",
                epoch,
                self._start,
                self._epoch,
            )
        self._iteration += 1  # whatever is still being iterated belongs to the other epoch
        self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        if epoch != self._epoch or self._leg is not self._whole_epoch:
            self._order = None
        self._epoch = epoch
        self._leg = self._whole_epoch
        self._start = 0
        self._received = 0
        self._resumes = False

    def state_dict(self) -> dict[str, Any]:
        """Where the trainer stands: plain numbers, the same on all ranks.

        Save it from any rank, load it on every one of however many ranks go on.
        """
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "batches_yielded": self._received,
            "fingerprint": self.fingerprint,
            **self._permutation_settings(),
            "num_replicas": self._leg.num_replicas,
            "batch_sizes": list(self._leg.batch_sizes),
            "drop_last": self._leg.drop_last,
            "bucket_order": self._leg.bucket_order,
            "leg_first_batch": self._leg.first_batch,
            "leg_consumed": list(self._leg.consumed),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was saved: the next iteration skips what it says was yielded.

        A state of ``epoch`` and ``batches_yielded`` alone is taken to be this very set-up's. A
        fuller one is checked, and may come from another number of ranks or other batch sizes.
        """
        epoch = _whole_number(state_dict, "epoch")
        yielded = _whole_number(state_dict, "batches_yielded")
        leg = self._whole_epoch
        if "version" in state_dict:
            self._check_belongs_here(state_dict)
            leg = self._leg_after(state_dict, epoch, yielded)
        if yielded > leg.first_batch + leg.total_batches:
            raise StateError(
                f"the state says {yielded} batches of epoch {epoch} were yielded, but the epoch has only "
                f"{leg.first_batch + leg.total_batches}; it belongs to other data or other batch sizes"
            )
        self._begin_epoch(epoch)
        self._leg = leg
        self._order = None
        self._start = self._received = yielded
        self._resumes = True
        self._iteration += 1

    @property
    def fingerprint(self) -> str:
        """What identifies the samples: the dataset's own fingerprint, and which of them are in what bucket."""
        if self._fingerprint is None:
            own = str(getattr(self.dataset, "fingerprint", None))
            self._fingerprint = _digest_of_buckets(own, self.bucket_keys, self._groups)
        return self._fingerprint

    def _permutation_settings(self) -> dict[str, Any]:
        """All that decides the permutations, so that two states can be compared."""
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "shuffle_buckets": self.shuffle_buckets,
            "shuffle_within_bucket": self.shuffle_within_bucket,
        }

    def _check_belongs_here(self, state: Mapping[str, Any]) -> None:
        expected = {"version": STATE_VERSION, "fingerprint": self.fingerprint, **self._permutation_settings()}
        for name, here in expected.items():
            if state.get(name) != here:
                origin = "dataset" if name == "fingerprint" else "order"
                raise StateError(
                    f"the state's {name} is {state.get(name)!r}, but this sampler's is {here!r}; "
                    f"a state can only go on with the {origin} it came from"
                )

    def _leg_after(self, state: Mapping[str, Any], epoch: int, yielded: int) -> Leg:
        """The leg to go on with: the saved one if the set-up is the same, else one over what it left."""
        try:
            saved = replace(
                self._whole_epoch,
                num_replicas=int(state["num_replicas"]),
                batch_sizes=tuple(int(size) for size in state["batch_sizes"]),
                drop_last=bool(state["drop_last"]),
                bucket_order=str(state["bucket_order"]),
                first_batch=int(state["leg_first_batch"]),
                consumed=tuple(int(count) for count in state["leg_consumed"]),
            )
            if saved.bucket_order not in BUCKET_ORDERS or not isinstance(state["drop_last"], bool):
                raise ValueError(f"bucket_order {saved.bucket_order!r}, drop_last {state['drop_last']!r}")
            if not all(0 <= used <= size for used, size in zip(saved.starts, saved.sizes, strict=True)):
                raise ValueError(f"leg_consumed {saved.consumed} of {saved.sizes}")
            done_in_leg = yielded - saved.first_batch
            if not 0 <= done_in_leg <= saved.total_batches:
                raise ValueError(f"batches_yielded {yielded} is outside its leg")
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise StateError(
                f"the state is damaged ({error!r}); load one that state_dict() returned"
            ) from None
        here = self._whole_epoch
        if replace(saved, first_batch=0, consumed=()) == here:
            return saved
        done = _EpochOrder(self, saved, epoch=epoch).schedule.batches_done(done_in_leg)
        return replace(here, first_batch=yielded, consumed=saved.consumed_after(done))


class _EpochOrder:
    """One epoch's permutations and schedule for one leg."""

    def __init__(self, sampler: SequentialBucketSampler, leg: Leg, epoch: int | None = None) -> None:
        epoch = sampler.epoch if epoch is None else epoch
        interleaved = leg.bucket_order == "interleaved"
        self.leg = leg
        self.permutations = EpochPermutations(
            leg.sizes,
            seed=sampler.seed,
            epoch=epoch,
            shuffle_buckets=sampler.shuffle_buckets,
            shuffle_within_bucket=sampler.shuffle_within_bucket,
            keep=len(leg.sizes) if interleaved else 1,
        )
        self.schedule: SequentialSchedule | InterleavedSchedule = (
            InterleavedSchedule(leg, seed=sampler.seed, epoch=epoch)
            if interleaved
            else SequentialSchedule(leg, self.permutations.bucket_sequence)
        )

    def bucket_and_samples(self, batch_idx: int, rank: int) -> tuple[int, Indices]:
        bucket, batch = self.schedule.locate(batch_idx - self.leg.first_batch)
        return bucket, self.permutations.take(bucket, self.leg.positions(bucket, batch, rank))


def _look_up(indices: Any, positions: Indices) -> list[int]:
    """``[indices[p] for p in positions]``, quick for ranges and arrays."""
    if isinstance(indices, range):
        return [int(index) for index in indices.start + positions * indices.step]
    if isinstance(indices, np.ndarray):
        return [int(index) for index in indices[positions]]
    return [int(indices[position]) for position in positions]


def _bucket_name(key: Any) -> str:
    """A bucket's key as people write it: ("wide", (832, 480)) is "wide 832x480"."""
    if not isinstance(key, tuple):
        return str(key)
    return " ".join("x".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in key)


def _digest_of_buckets(own: str, keys: Sequence[Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """Recognises a dataset by its buckets, their sizes and a few of their indices, at any scale."""
    digest = hashlib.blake2b(own.encode(), digest_size=16)
    for key, group in zip(keys, groups, strict=True):
        indices = group["indices"]
        size = len(indices)
        probes = sorted({size * i // 64 for i in range(64)} | {size - 1}) if size else []
        digest.update(repr((key, tuple(group["resolution"]), size)).encode())
        digest.update(repr([int(indices[probe]) for probe in probes]).encode())
    return digest.hexdigest()


def _whole_number(state: Mapping[str, Any], name: str) -> int:
    if not isinstance(state, Mapping) or name not in state:
        raise StateError(f"the state has no {name!r}; load one that state_dict() returned")
    value = state[name]
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise StateError(f"the state's {name} is {value!r}; it must be a whole number, 0 or more")
    return number
