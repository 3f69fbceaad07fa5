"""The loader: PyTorch's ``DataLoader`` with threads as workers and an exact state.

It differs from its base class in three ways. Its state counts the batches that the trainer received, not those that
were prefetched. It leaves the global random state alone. Its workers are threads: reading is system calls, during
which other threads run. A worker process would pass its batches through shared memory, which costs more than reading
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from latentry.cache.read.buffer_pool import BufferPool
from latentry.cache.read.read_threads import ReadThreads
from latentry.cache.read.resources import ReadResources
from latentry.errors import ConfigError, StateError
from latentry.hardware import devices_of_machine, has_device
from latentry.serve.accelerate_hooks import AccelerateHooks
from latentry.serve.collate import Batch
from latentry.serve.progress import EpochIteration
from latentry.serve.sampler import SequentialBucketSampler


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """How a cache is served: the builders' parameters, checked."""

    batch_size: int
    """Samples per batch and rank; with ``dynamic_batch_size`` the number at ``base_resolution``."""
    dp_rank: int | None
    """This rank; None asks ``torch.distributed``."""
    dp_world_size: int | None
    """The number of ranks; None asks ``torch.distributed``."""
    base_resolution: Sequence[int]
    """Width and height that ``batch_size`` is meant for."""
    drop_last: bool
    """Leave out the incomplete batch at the end of each bucket."""
    shuffle: bool
    """Permute the buckets and the samples of each bucket."""
    dynamic_batch_size: bool
    """Scale batch sizes so that all batches have about the same number of pixels."""
    num_workers: int
    """Threads that prefetch batches; 0 reads each batch when it is requested."""
    pin_memory: bool
    """Read batches into pinned memory, for faster copies to a GPU; ignored without CUDA."""
    prefetch_factor: int
    """Batches that are prefetched per worker thread."""
    seed: int
    """Seed of the permutations."""
    device: str | torch.device | None
    """Where batches are moved before the trainer gets them; None leaves them in main memory."""
    bucket_order: str
    """``sequential`` or ``interleaved``."""

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
        _ = self.torch_device  # raises an error if there is no such device

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
        if not has_device(self.device if isinstance(self.device, str) else device):
            raise ConfigError(f"device is {str(self.device)!r}, but {devices_of_machine()}")
        return device


class ServedDataset(Protocol):
    """What the loader needs of a dataset.

    Without items of its own, a dataset also has ``read_batch`` and ``collate``, as ``BaseMultiresolutionDataset`` does.
    """

    @property
    def is_packed(self) -> bool:
        """Whether samples are stored in shards, rather than one file per sample."""

    @property
    def has_own_items(self) -> bool:
        """Whether batches consist of what ``__getitems__`` returns."""

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...
    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]: ...
    def collate_items(self, items: Sequence[dict[str, Any]]) -> Batch: ...


class LatentDataLoader(AccelerateHooks, DataLoader[Any]):
    """Batches of a cache, with a state that counts what the trainer has received.

    >>> for batch in loader: ...
    >>> torch.save(loader.state_dict(), "loader.pt")
    >>> loader.load_state_dict(torch.load("loader.pt"))   # with any num_workers, on any number of ranks

    ``dataset``, ``batch_sampler``, ``collate_fn``, ``num_workers``, ``prefetch_factor``, ``pin_memory`` and ``len()``
    mean what they mean for PyTorch's ``DataLoader``, except that workers are threads. ``pin_memory`` is False without
    CUDA, and ``prefetch_factor`` is None without workers.

    Only one pass over the loader counts at a time. Beginning another pass, or iterating over the sampler, ends the
    earlier one: its next batch raises ``StateError``.

    Args:
        dataset: The samples.
        sampler: Their order; the loader's state is the sampler's state.
        collate_fn: Makes a batch of a list of samples. None uses the dataset's own ``collate``, which needs no copy.
        config: How batches are read. Its values for the sampler are not used here.
    """

    def __init__(
        self,
        dataset: ServedDataset,
        sampler: SequentialBucketSampler,
        collate_fn: Callable[[Sequence[Mapping[str, Any]]], Batch] | None,
        config: LoaderConfig,
    ) -> None:
        sampler.check_for_batches()
        super().__init__(
            dataset,  # type: ignore[arg-type]  # PyTorch needs only __getitem__, but asks for its own class
            batch_sampler=sampler,
            collate_fn=dataset.collate_items if collate_fn is None else collate_fn,
        )
        # Set after PyTorch's own __init__, which would warn about worker processes that do not exist.
        self.num_workers = config.num_workers
        self.prefetch_factor = config.prefetch_factor if config.num_workers else None
        self.pin_memory = config.pin_memory and torch.cuda.is_available()
        self.bucket_sampler = sampler
        self.device = config.torch_device
        # Workers read several batches at a time. More threads per batch still help if a sample needs only reads, but
        # not if its file has to be parsed: then the GIL is the bottleneck.
        one_thread = config.num_workers > 0 and not dataset.is_packed
        self._resources = ReadResources(
            BufferPool(self.pin_memory), ReadThreads(1) if one_thread else ReadThreads()
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # a generator, not PyTorch's iterator class
        iteration = self.bucket_sampler.begin_iteration()
        with self.announced_to_accelerate():
            for step, batch in zip(iteration.steps, self._batches(iteration), strict=True):
                if not iteration.is_current:
                    raise StateError(
                        "a newer iteration of this loader or its sampler, or another epoch, has begun; "
                        "continue with the newest one"
                    )
                iteration.mark_received(step)
                self.end_of_dataloader = step == iteration.steps[-1]
                yield batch if self.device is None else _map_tensors(batch, self._to_device)

    def _batches(self, iteration: EpochIteration) -> Iterator[Batch]:
        """The batches in order, prefetched by threads, or read on request.

        PyTorch's own iterators draw seeds from the global generator, so a resumed run would see other noise.
        """
        read = self._reader()
        if not self.num_workers:
            for step in iteration.steps:
                yield read(iteration.indices(step))
            return
        max_waiting = self.num_workers * (self.prefetch_factor or 1)
        waiting: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="latentry") as pool:
            try:
                for step in iteration.steps:
                    waiting.append(pool.submit(read, iteration.indices(step)))
                    if len(waiting) > max_waiting:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _reader(self) -> Callable[[Sequence[int]], Batch]:
        """The function that reads and collates a batch."""
        dataset: Any = self.dataset
        collate: Callable[[Any], Batch] = self.collate_fn
        is_own_collate = collate == dataset.collate_items

        def read(indices: Sequence[int]) -> Batch:
            if dataset.has_own_items:
                batch = collate(dataset.__getitems__(indices))
            elif is_own_collate:
                batch = dataset.collate(dataset.read_batch(indices, self._resources))
            else:
                batch = collate(dataset.read_batch(indices, self._resources).items())
            # What was read into pinned memory stays as it is.
            return _map_tensors(batch, torch.Tensor.pin_memory) if self.pin_memory else batch

        return read

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # Without waiting only for CUDA: elsewhere, the buffer could be reused before the copy is made.
        return tensor.to(self.device, non_blocking=self.device is not None and self.device.type == "cuda")

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch's shuffle, from its beginning.

        Args:
            epoch: The epoch. If it is the epoch of a state just loaded, the loaded position is kept.
        """
        self.bucket_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the trainer as plain numbers; the same as the sampler's state."""
        return self.bucket_sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue after the batches that the state counts as received.

        Args:
            state_dict: What ``state_dict`` returned, with any number of workers and ranks.
        """
        self.bucket_sampler.load_state_dict(state_dict)


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with a function applied to each tensor, also in dictionaries inside of it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(entry, change) for key, entry in value.items()}
    return value
