"""The loader: a ``DataLoader`` of PyTorch's with three differences.

Its state counts the batches the trainer received (not those that were read ahead), it leaves the global random state
alone, and its workers are threads. Reading is system calls, during which other threads run; a worker process would have
to hand over its batches through shared memory, which costs more than reading them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from latentry.cache.read.buffer_pool import BufferPool
from latentry.cache.read.read_threads import ReadThreads
from latentry.errors import ConfigError, StateError
from latentry.serve.collate import Batch
from latentry.serve.dataset import BaseMultiresolutionDataset
from latentry.serve.sampler import SequentialBucketSampler


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """How a cache is served: the values of the builders' parameters, checked."""

    batch_size: int
    """Samples per batch and rank; with ``dynamic_batch_size``, that at ``base_resolution``."""
    dp_rank: int | None
    """None, like that of ``dp_world_size``, asks ``torch.distributed``."""
    dp_world_size: int | None
    base_resolution: Sequence[int]
    drop_last: bool
    shuffle: bool
    dynamic_batch_size: bool
    num_workers: int
    """Threads that read ahead; 0 reads a batch when it is asked for."""
    pin_memory: bool
    """Page-locked batches, for quicker copies to a GPU; without one it is ignored."""
    prefetch_factor: int
    """Batches that are read ahead for each worker."""
    seed: int
    device: str | torch.device | None
    """Where batches go before the trainer gets them; None leaves them in main memory."""
    bucket_order: str

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("num_workers", 0), ("prefetch_factor", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number, at least {least}")
        for name in ("drop_last", "shuffle", "dynamic_batch_size", "pin_memory"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} is {value!r}; it must be true or false")
        for name in ("dp_rank", "dp_world_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number")
        sides = list(self.base_resolution) if isinstance(self.base_resolution, Iterable) else []
        if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
            raise ConfigError(f"base_resolution is {self.base_resolution!r}; it must be [width, height]")
        assert self.torch_device is None or self.torch_device.type

    @property
    def torch_device(self) -> torch.device | None:
        if self.device is None:
            return None
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ConfigError(
                f"device is {self.device!r}; write for example 'cuda', 'cuda:1' or 'cpu'"
            ) from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device is {self.device!r}, but there is no CUDA device here; use 'cpu'")
        return device


class LatentDataLoader(DataLoader[Any]):
    """Batches of a cache, with a state that says what the trainer has received.

    >>> for batch in loader: ...
    >>> torch.save(loader.state_dict(), "loader.pt")
    >>> loader.load_state_dict(torch.load("loader.pt"))   # with any num_workers, on any number of ranks
    """

    def __init__(
        self,
        dataset: BaseMultiresolutionDataset,
        sampler: SequentialBucketSampler,
        collate_fn: Callable[[Sequence[Mapping[str, Any]]], Batch],
        config: LoaderConfig,
    ) -> None:
        # Batches are put together in page-locked memory, if that is wanted, not copied there.
        dataset.batch_memory = BufferPool(config.pin_memory and torch.cuda.is_available())
        if config.num_workers and not dataset.is_packed:
            # Several batches are read at a time already. Threads that only read still help where nothing else is to
            # be done for a sample, but not where its file must be understood first: Python's lock is what is short.
            dataset.reads = ReadThreads(1)
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=collate_fn,
        )
        sampler.counts_on_yield = False
        self.bucket_sampler = sampler
        self.device = config.torch_device
        self.num_threads = config.num_workers
        self._read_ahead = config.prefetch_factor * config.num_workers

    def _batches(self) -> Iterator[Batch]:
        """Batches in order, read ahead by threads, or as they are asked for.

        PyTorch's own iterators draw seeds from the global generator, and a resumed training run would see other noise.
        """
        if not self.num_threads:
            yield from map(self._batch, self.bucket_sampler)
            return
        waiting: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(self.num_threads, thread_name_prefix="latentry") as pool:
            try:
                for indices in self.bucket_sampler:
                    waiting.append(pool.submit(self._batch, indices))
                    if len(waiting) > self._read_ahead:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _batch(self, indices: Sequence[int]) -> Batch:
        dataset: Any = self.dataset
        batch: Batch = self.collate_fn(dataset.__getitems__(indices))
        return batch

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # a generator, not torch's iterator class
        sampler = self.bucket_sampler
        iteration = sampler.begin_iteration()
        for batch in self._batches():
            if not sampler.is_current(iteration):
                raise StateError(
                    "a newer iteration of this loader, or another epoch, has begun; go on with that one"
                )
            sampler.advance(iteration)
            yield batch if self.device is None else _to_device(batch, self.device)

    def set_epoch(self, epoch: int) -> None:
        """Go to this epoch's shuffle."""
        self.bucket_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the trainer stands; the same as the sampler's state."""
        return self.bucket_sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on behind the batches that the state says were received."""
        self.bucket_sampler.load_state_dict(state_dict)


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _to_device(entry, device) for key, entry in value.items()}
    return value
