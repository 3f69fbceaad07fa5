"""From a cache to the batches a trainer receives: collate functions, loader builders, YAML.

The loader is a ``DataLoader`` of PyTorch's with three differences: its state counts the batches the trainer
received (not those that were read ahead), it leaves the global random state alone, and its workers are threads.
Reading is system calls, during which other threads run; a worker process would have to hand over its batches
through shared memory, which costs more than reading them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from latentry.cache.memory import BatchMemory
from latentry.cache.reads import Reads
from latentry.datasets import (
    VIDEO_OPTIONAL_FIELDS,
    BaseMultiresolutionDataset,
    TextToImageDataset,
    TextToVideoDataset,
)
from latentry.errors import CacheFileError, ConfigError, StateError
from latentry.items import BatchColumns, Item, Items
from latentry.sampler import SequentialBucketSampler

Batch = dict[str, Any]

# ---- collate --------------------------------------------------------------------------------


def collate_fn_production(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """Image samples side by side: tensors stacked, everything else in lists, keys unchanged."""
    columns = _columns(batch)
    tensors = ("latent", "crop_resolution", "original_resolution", "crop_offset")
    texts = ("clip_hidden", "pooled_prompt_embeds", "prompt_embeds", "clip_tokens", "t5_tokens")
    output: Batch = {key: _stacked(columns, key) for key in tensors}
    output |= {key: columns.values[key] for key in ("prompt", "image_path", "bucket_id", "aspect_ratio")}
    output |= {key: _stacked(columns, key) for key in texts if key in columns.tensors}
    return output


def collate_fn_text_to_image(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """Image samples as a trainer's batch: latents and text on top, the rest under ``metadata``."""
    joined = collate_fn_production(batch)
    output: Batch = {
        "image_latents": joined["latent"],
        "data_type": "image",
        "metadata": {
            "prompts": joined["prompt"],
            "image_paths": joined["image_path"],
            "bucket_ids": joined["bucket_id"],
            "aspect_ratios": joined["aspect_ratio"],
            "crop_resolution": joined["crop_resolution"],
            "original_resolution": joined["original_resolution"],
            "crop_offset": joined["crop_offset"],
        },
    }
    if "prompt_embeds" in joined:
        output["text_embeddings"] = joined["prompt_embeds"]
    for key in ("pooled_prompt_embeds", "clip_hidden", "clip_tokens", "t5_tokens"):
        if key in joined:
            output[key] = joined[key]
    return output


def collate_fn_video(batch: Sequence[Mapping[str, Any]], model_type: str = "wan") -> Batch:
    """Video samples as a trainer's batch, joined along their leading dimension.

    Which optional fields there are is the cache's to say; ``model_type`` is taken because callers
    of the documented interface pass it.
    """
    columns = _columns(batch)
    output: Batch = {
        "video_latents": _stacked(columns, "video_latents").flatten(0, 1),
        "text_embeddings": _stacked(columns, "text_embeddings").flatten(0, 1),
        "data_type": "video",
    }
    for key in VIDEO_OPTIONAL_FIELDS:
        if key in columns.tensors:
            output[key] = _stacked(columns, key).flatten(0, 1)
    return output


def _columns(batch: Sequence[Mapping[str, Any]]) -> BatchColumns:
    """A batch by column: as it was read, or from items that somebody has made or may have changed."""
    if not len(batch):
        raise ConfigError("a batch without samples cannot be collated")
    if isinstance(batch, Items) and batch.columns is not None:
        return batch.columns
    columns = {key: [item.get(key) for item in batch] for key in dict.fromkeys(chain.from_iterable(batch))}
    return BatchColumns(columns, columns, lambda i: _where(batch[i]))


def _where(item: Mapping[str, Any]) -> str:
    return item.where if isinstance(item, Item) else str(item.get("cache_file", "a sample"))


def _stacked(columns: BatchColumns, key: str) -> torch.Tensor:
    """The tensors of all samples, which must be alike."""
    column = columns.tensors.get(key, [])
    if isinstance(column, torch.Tensor):
        return column
    tensors = [tensor for tensor in column if tensor is not None]
    if not tensors:
        raise CacheFileError(f"{columns.where(0)} has no {key}")
    like, first = tensors[0], next(i for i, tensor in enumerate(column) if tensor is not None)
    for i, tensor in enumerate(column):
        if tensor is None or tensor.shape != like.shape:
            found = "absent" if tensor is None else f"{list(tensor.shape)}"
            raise CacheFileError(
                f"{columns.where(i)}: {key} is {found}, but {list(like.shape)} in {columns.where(first)} of the same "
                "bucket; a batch must stack"
            )
    return torch.stack(tensors)


# ---- the loader -----------------------------------------------------------------------------


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
        dataset.batch_memory = BatchMemory(config.pin_memory and torch.cuda.is_available())
        if config.num_workers and not dataset.is_packed:
            # Several batches are read at a time already. Threads that only read still help where nothing else is to
            # be done for a sample, but not where its file must be understood first: Python's lock is what is short.
            dataset.reads = Reads(1)
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


# ---- builders -------------------------------------------------------------------------------


def build_text_to_image_multiresolution_dataloader(
    *,
    cache_dir: str | os.PathLike[str],
    train_text_encoder: bool = False,
    batch_size: int = 1,
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    base_resolution: Sequence[int] = (256, 256),
    drop_last: bool = True,
    shuffle: bool = True,
    dynamic_batch_size: bool = False,
    num_workers: int = 4,
    pin_memory: bool = True,
    prefetch_factor: int = 2,
    seed: int = 42,
    device: str | torch.device | None = None,
    bucket_order: str = "sequential",
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """A loader over an image cache, and its sampler.

    >>> loader, sampler = build_text_to_image_multiresolution_dataloader(cache_dir="cache", batch_size=8)

    ``train_text_encoder`` gives token ids (``clip_tokens``, ``t5_tokens``) instead of embeddings.
    """
    return _build(
        TextToImageDataset(cache_dir, train_text_encoder=train_text_encoder),
        collate_fn_text_to_image,
        LoaderConfig(
            batch_size=batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            base_resolution=base_resolution,
            drop_last=drop_last,
            shuffle=shuffle,
            dynamic_batch_size=dynamic_batch_size,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            seed=seed,
            device=device,
            bucket_order=bucket_order,
        ),
    )


def build_video_multiresolution_dataloader(
    *,
    cache_dir: str | os.PathLike[str],
    model_type: str = "wan",
    device: str | torch.device | None = None,
    batch_size: int = 1,
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    base_resolution: Sequence[int] = (512, 512),
    drop_last: bool = True,
    shuffle: bool = True,
    dynamic_batch_size: bool = False,
    num_workers: int = 2,
    pin_memory: bool = True,
    prefetch_factor: int = 2,
    seed: int = 42,
    bucket_order: str = "sequential",
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """A loader over a video cache, and its sampler.

    >>> loader, sampler = build_video_multiresolution_dataloader(cache_dir="cache", model_type="wan")
    """
    return _build(
        TextToVideoDataset(cache_dir, model_type=model_type),
        functools.partial(collate_fn_video, model_type=model_type),
        LoaderConfig(
            batch_size=batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            base_resolution=base_resolution,
            drop_last=drop_last,
            shuffle=shuffle,
            dynamic_batch_size=dynamic_batch_size,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            seed=seed,
            device=device,
            bucket_order=bucket_order,
        ),
    )


def _build(
    dataset: BaseMultiresolutionDataset,
    collate_fn: Callable[[Sequence[Mapping[str, Any]]], Batch],
    config: LoaderConfig,
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    width, height = config.base_resolution
    sampler = SequentialBucketSampler(
        dataset,
        base_batch_size=config.batch_size,
        base_resolution=(int(width), int(height)),
        drop_last=config.drop_last,
        shuffle_buckets=config.shuffle,
        shuffle_within_bucket=config.shuffle,
        dynamic_batch_size=config.dynamic_batch_size,
        seed=config.seed,
        num_replicas=config.dp_world_size,
        rank=config.dp_rank,
        bucket_order=config.bucket_order,
    )
    return LatentDataLoader(dataset, sampler, collate_fn, config), sampler


# ---- YAML -----------------------------------------------------------------------------------

_BUILDERS: dict[str, Callable[..., tuple[LatentDataLoader, SequentialBucketSampler]]] = {
    f"{module}.{builder.__name__}": builder
    for module in (
        "latentry",
        "latentry.loader",
        "nemo_automodel.components.datasets.diffusion",
        "nemo_automodel.components.datasets.diffusion.collate_fns",
    )
    for builder in (build_text_to_image_multiresolution_dataloader, build_video_multiresolution_dataloader)
}
"""What ``_target_`` may say. A configuration never makes anything be imported."""


def from_config(
    config: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """The loader and sampler that a YAML file (or its dictionary) describes.

    >>> loader, sampler = from_config("train.yaml", batch_size=4, dp_rank=rank, dp_world_size=world)

    The description stands under ``data: dataloader:``, under ``dataloader:`` or at the top, and
    names its builder in ``_target_``. ``overrides`` replace or add parameters.
    """
    if not isinstance(config, (str, os.PathLike, Mapping)):
        raise ConfigError(f"a configuration is a path or a dictionary, not {config!r}")
    where = "the configuration" if isinstance(config, Mapping) else str(config)
    node = _dataloader_node(config if isinstance(config, Mapping) else _read_yaml(Path(config)), where)
    arguments = {**node, **overrides}
    target = arguments.pop("_target_", None)
    if not isinstance(target, str) or target not in _BUILDERS:
        raise ConfigError(f"{where}: _target_ is {target!r}; allowed are {', '.join(_BUILDERS)}")
    builder = _BUILDERS[target]
    known = inspect.signature(builder).parameters
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: {builder.__name__} has no parameter {name!r}; {hint}")
    if "cache_dir" not in arguments:
        raise ConfigError(f"{where}: cache_dir is missing; name the folder of a finished cache")
    return builder(**arguments)


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def _dataloader_node(config: Any, where: str) -> Mapping[str, Any]:
    node = config
    for key in ("data", "dataloader"):
        if isinstance(node, Mapping) and "_target_" not in node and key in node:
            node = node[key]
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{where} has no 'data: dataloader:' section with a _target_")
    return node
