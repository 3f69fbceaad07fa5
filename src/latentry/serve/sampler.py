"""Which samples a rank trains on at each step: deterministic, resumable, with the same bucket on all ranks.

The sampler stores no list of batches. Seed, epoch, bucket sizes and ranks decide an epoch, each batch is computed from
them, and the saved state is a few integers. So a resume takes milliseconds anywhere in an epoch, and may continue on
another number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch.distributed as dist
from torch.utils.data import Sampler

from latentry.buckets import MultiTierBucketCalculator
from latentry.counted import counted
from latentry.errors import ConfigError
from latentry.serve.epoch_order import BUCKET_ORDERS, OrderSettings
from latentry.serve.order import Segment
from latentry.serve.progress import EpochIteration, EpochProgress
from latentry.serve.sampler_state import buckets_fingerprint, load_state, save_state

logger = logging.getLogger(__name__)

_NUM_BUCKETS_SHOWN = 5


class BucketedDataset(Protocol):
    """What the sampler needs of a dataset.

    Each group has ``indices`` (a list, a numpy array or a ``range``), ``resolution``, ``pixels`` and ``aspect_name``.
    If the dataset has a ``fingerprint``, it is part of the saved state. If it has ``draws_captions``, and that is true,
    indices say which caption is read: they are ``SampleIndex`` objects.
    """

    calculator: MultiTierBucketCalculator

    @property
    def sorted_bucket_keys(self) -> Sequence[Any]: ...
    @property
    def bucket_groups(self) -> Mapping[Any, Mapping[str, Any]]: ...


class SequentialBucketSampler(Sampler[list[int]]):
    """Batches of one bucket each, divided among the ranks.

    >>> sampler = SequentialBucketSampler(dataset, base_batch_size=8, num_replicas=2, rank=0)
    >>> sampler.set_epoch(3)
    >>> for indices in sampler: ...

    Each sample comes once per epoch, except that padding to a multiple of the ranks repeats some, and ``drop_last``
    leaves out incomplete batches. All ranks see the same bucket at every step and get the same number of batches.
    Iterating counts the batches it yields. A loader that prefetches uses ``begin_iteration`` instead, and counts what
    its trainer receives.

    Args:
        dataset: The samples by bucket, such as a ``TextToImageDataset``.
        base_batch_size: Samples per batch and rank; with ``dynamic_batch_size`` the number at ``base_resolution``.
        base_resolution: Width and height that ``base_batch_size`` is meant for.
        drop_last: Leave out the incomplete batch at the end of each bucket. A warning says once how many samples
            that is, by bucket. A loader raises an error if no batch is left.
        shuffle_buckets: Permute the buckets.
        shuffle_within_bucket: Permute the samples of each bucket.
        dynamic_batch_size: Scale batch sizes so that all batches have about the same number of pixels.
        seed: Seed of the permutations; the epoch is added to it.
        num_replicas: The number of ranks. By default the world size of ``torch.distributed``, or 1.
        rank: This rank. By default the rank of ``torch.distributed``, or 0.
        bucket_order: ``sequential`` finishes a bucket before the next one. ``interleaved`` draws the next bucket at
            random, in proportion to the batches that each has left.
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
        self._follows_torch = num_replicas is None
        if num_replicas is None:
            num_replicas = _world_size()
        if rank is None:
            rank = dist.get_rank() if _is_distributed() else 0
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
        self.bucket_keys = list(dataset.sorted_bucket_keys)
        self.bucket_groups = dataset.bucket_groups
        self.calculator = dataset.calculator
        self._groups = [dataset.bucket_groups[key] for key in self.bucket_keys]
        self._whole_epoch = Segment(
            sizes=tuple(len(group["indices"]) for group in self._groups),
            batch_sizes=tuple(self._get_batch_size(tuple(group["resolution"])) for group in self._groups),
            num_replicas=num_replicas,
            drop_last=drop_last,
            bucket_order=bucket_order,
        )
        self._settings = OrderSettings(seed, shuffle_buckets, shuffle_within_bucket)
        self._progress = EpochProgress(
            self._whole_epoch,
            self._settings,
            self._groups,
            rank,
            draws_captions=getattr(dataset, "draws_captions", False),
        )
        self._fingerprint: str | None = None
        if rank == 0:
            self._report_left_out()

    # ---- the batches ------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        # A generator begins its pass when its first batch is drawn, not when it is created. This matters because a pass
        # uses up a loaded position. PyTorch's loader with worker processes creates two iterators and draws from the
        # second. Lightning creates an iterator and then sets the epoch.
        iteration = self.begin_iteration()
        for step in iteration.steps:
            indices = iteration.indices(step)
            iteration.mark_received(step)
            yield indices

    def begin_iteration(self) -> EpochIteration:
        """Begin a pass: after the position of a state just loaded, otherwise at the beginning of the epoch."""
        if self._follows_torch and _is_distributed() and _world_size() != self.num_replicas:
            raise ConfigError(
                f"the sampler was built for {self.num_replicas} ranks, but torch.distributed now has {_world_size()}; "
                "build it after the process group is initialized, or pass the number of ranks and the rank"
            )
        return self._progress.begin_iteration()

    @property
    def sampler(self) -> SequentialBucketSampler:
        """The sampler itself: trainers such as Lightning call ``batch_sampler.sampler.set_epoch``."""
        return self

    def __len__(self) -> int:
        """The number of batches of this epoch on every rank, those before a resume included."""
        return self._calculate_total_batches()

    def get_batch(self, batch_idx: int) -> list[int]:
        """This rank's samples of a batch of this epoch. It is computed directly and moves nothing.

        Args:
            batch_idx: The number of the batch, counted from the beginning of the epoch.
        """
        if not self._segment.first_batch <= batch_idx < len(self):
            raise IndexError(
                f"batch {batch_idx} of epoch {self.epoch}: there are batches {self._segment.first_batch} "
                f"to {len(self) - 1}"
            )
        return self._progress.indices(batch_idx)

    def get_batch_info(self, batch_idx: int) -> dict[str, Any]:
        """The bucket of a batch of this epoch; an empty dictionary if there is no such batch.

        ``batch_size`` is the number of samples that each rank gets in this batch.

        Args:
            batch_idx: The number of the batch, counted from the beginning of the epoch.
        """
        if not self._segment.first_batch <= batch_idx < len(self):
            return {}
        bucket, batch = self._progress.order.bucket_and_batch(batch_idx)
        group = self._groups[bucket]
        return {
            "bucket_key": self.bucket_keys[bucket],
            "resolution": group["resolution"],
            "batch_size": self._segment.batch_length(bucket, batch),
            "aspect_name": group["aspect_name"],
        }

    def _get_batch_size(self, resolution: tuple[int, int]) -> int:
        """The batch size for a resolution: fixed, or scaled to about the same number of pixels."""
        if not self.dynamic_batch_size:
            return self.base_batch_size
        return self.calculator.get_dynamic_batch_size(resolution, self.base_batch_size, self.base_resolution)

    def _calculate_total_batches(self) -> int:
        """The epoch's batches, the same on all ranks because every bucket is padded to a multiple of them."""
        return self._segment.end_batch

    @property
    def _segment(self) -> Segment:
        return self._progress.position.segment

    @property
    def left_out(self) -> dict[Any, int]:
        """The number of samples that ``drop_last`` leaves out of each bucket, for buckets with any."""
        counts = (self._whole_epoch.left_out(bucket) for bucket in range(len(self._groups)))
        return {key: count for key, count in zip(self.bucket_keys, counts, strict=True) if count}

    def check_for_batches(self) -> None:
        """Raise a ``ConfigError`` if ``drop_last`` leaves no batch of any bucket. An empty dataset is not an error."""
        sizes, batch_sizes = self._whole_epoch.sizes, self._whole_epoch.batch_sizes
        if len(self) or not sum(sizes):
            return
        shown = [
            f"{_bucket_name(key)} has {counted(size, 'sample')} for batches of {batch_size}"
            for key, size, batch_size in zip(self.bucket_keys, sizes, batch_sizes, strict=True)
        ]
        if len(shown) > _NUM_BUCKETS_SHOWN:
            shown[_NUM_BUCKETS_SHOWN:] = [f"and {counted(len(shown) - _NUM_BUCKETS_SHOWN, 'more bucket')}"]
        ranks = f" on each of {self.num_replicas} ranks" if self.num_replicas > 1 else ""
        raise ConfigError(
            f"an epoch has no batch, because drop_last leaves out incomplete ones: {', '.join(shown)}{ranks}; "
            "choose a smaller batch size, or drop_last=False"
        )

    def _report_left_out(self) -> None:
        if not (left_out := self.left_out):
            return
        by_bucket = ", ".join(f"{_bucket_name(key)}: {count}" for key, count in left_out.items())
        logger.warning(
            "drop_last leaves out %d of %d samples in every epoch, by bucket: %s%s",
            sum(left_out.values()),
            sum(self._whole_epoch.sizes),
            by_bucket,
            "" if len(self) else "; those are all samples: there is no batch left",
        )

    # ---- epochs and state -------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The current epoch; assigning it is the same as ``set_epoch``."""
        return self._progress.position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch's shuffle, from its beginning.

        Args:
            epoch: The epoch. If it is the epoch of a state just loaded, the loaded position is kept.
        """
        self._progress.set_epoch(epoch)

    def state_dict(self, batches_received: int | None = None) -> dict[str, Any]:
        """The position of the trainer as plain numbers, the same on all ranks.

        Save it on any rank, load it on every rank of the resumed run, however many there are.

        Args:
            batches_received: The state after this many batches of the epoch, those before a resume included. By
                default what was iterated counts. Loaders with worker processes draw batches ahead of the trainer;
                pass the trainer's own count there.
        """
        position = self._progress.position
        if batches_received is not None:
            first = self._segment.first_batch
            if not first <= batches_received <= len(self):
                raise ConfigError(
                    f"batches_received is {batches_received}; in epoch {self.epoch} it must be {first} to {len(self)}"
                )
            position = replace(position, batches_received=int(batches_received))
        return save_state(position, self.fingerprint, self._settings)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue after the batches that the state counts: the next iteration skips them, later ones do not.

        A state at the very end of an epoch is also the beginning of the next one. If the sampler is already set to
        the next epoch, that epoch starts at its beginning.

        Args:
            state_dict: What ``state_dict`` returned, possibly with another number of ranks or other batch sizes. A
                dictionary with only ``epoch`` and ``batches_yielded`` is taken as saved with the same ones.
        """
        self._progress.load(load_state(state_dict, self.fingerprint, self._settings, self._whole_epoch))

    @property
    def fingerprint(self) -> str:
        """Identifies the samples: the dataset's own fingerprint, and which samples are in which bucket."""
        if self._fingerprint is None:
            own = str(getattr(self.dataset, "fingerprint", None))
            self._fingerprint = buckets_fingerprint(own, self.bucket_keys, self._groups)
        return self._fingerprint


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _world_size() -> int:
    return dist.get_world_size() if _is_distributed() else 1


def _bucket_name(key: Any) -> str:
    """A bucket's key in readable form: ("wide", (832, 480)) is "wide 832x480"."""
    if not isinstance(key, tuple):
        return str(key)
    return " ".join("x".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in key)
