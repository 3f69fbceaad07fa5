"""The functions that build a loader, and loaders described by YAML files."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from latentry.errors import ConfigError
from latentry.serve.dataset import BaseMultiresolutionDataset, TextToImageDataset, TextToVideoDataset
from latentry.serve.loader import LatentDataLoader, LoaderConfig
from latentry.serve.sampler import SequentialBucketSampler


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
    caption_choice: str = "random",
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """Build a loader over an image cache. Returns the loader and its sampler.

    >>> loader, sampler = build_text_to_image_multiresolution_dataloader(cache_dir="cache", batch_size=8)

    Args:
        cache_dir: The folder of a finished image cache.
        train_text_encoder: Serve token ids (``clip_tokens``, ``t5_tokens``) instead of embeddings.
        batch_size: Samples per batch and rank; with ``dynamic_batch_size`` the number at ``base_resolution``.
        dp_rank: This data-parallel rank. By default the rank of ``torch.distributed``, or 0.
        dp_world_size: The number of data-parallel ranks. By default the world size of ``torch.distributed``, or 1.
        base_resolution: Width and height that ``batch_size`` is meant for.
        drop_last: Leave out the incomplete batch at the end of each bucket.
        shuffle: Permute the buckets and the samples of each bucket, differently in every epoch.
        dynamic_batch_size: Scale batch sizes so that all batches have about the same number of pixels.
        num_workers: Threads that prefetch batches. 0 reads each batch when it is requested.
        pin_memory: Read batches into pinned memory, for faster copies to a GPU. Ignored without CUDA.
        prefetch_factor: Batches that are prefetched per worker thread.
        seed: Seed of the permutations.
        device: Where batches are moved before the trainer gets them. By default they stay in main memory.
        bucket_order: ``sequential`` finishes a bucket before the next one. ``interleaved`` mixes the buckets.
        caption_choice: Which caption of several a sample has: ``random`` draws one for each epoch, ``first`` is
            always the same, and ``all`` adds a caption dimension to the text tensors.
    """
    return _build(
        TextToImageDataset(cache_dir, train_text_encoder=train_text_encoder, caption_choice=caption_choice),
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
    caption_choice: str = "random",
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """Build a loader over a video cache. Returns the loader and its sampler.

    >>> loader, sampler = build_video_multiresolution_dataloader(cache_dir="cache", model_type="wan")

    Args:
        cache_dir: The folder of a finished video cache.
        model_type: The model that is trained, such as ``wan`` or ``hunyuan``. A warning is logged if the cache was
            made for another one.
        device: Where batches are moved before the trainer gets them. By default they stay in main memory.
        batch_size: Samples per batch and rank; with ``dynamic_batch_size`` the number at ``base_resolution``.
        dp_rank: This data-parallel rank. By default the rank of ``torch.distributed``, or 0.
        dp_world_size: The number of data-parallel ranks. By default the world size of ``torch.distributed``, or 1.
        base_resolution: Width and height that ``batch_size`` is meant for.
        drop_last: Leave out the incomplete batch at the end of each bucket.
        shuffle: Permute the buckets and the samples of each bucket, differently in every epoch.
        dynamic_batch_size: Scale batch sizes so that all batches have about the same number of pixels per frame.
        num_workers: Threads that prefetch batches. 0 reads each batch when it is requested.
        pin_memory: Read batches into pinned memory, for faster copies to a GPU. Ignored without CUDA.
        prefetch_factor: Batches that are prefetched per worker thread.
        seed: Seed of the permutations.
        bucket_order: ``sequential`` finishes a bucket before the next one. ``interleaved`` mixes the buckets.
        caption_choice: Which caption of several a sample has: ``random`` draws one for each epoch, ``first`` is
            always the same, and ``all`` adds a caption dimension to the text tensors.
    """
    return _build(
        TextToVideoDataset(cache_dir, model_type=model_type, caption_choice=caption_choice),
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
    dataset: BaseMultiresolutionDataset, config: LoaderConfig
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
    return LatentDataLoader(dataset, sampler, None, config), sampler


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
"""The allowed values of ``_target_``. A configuration never causes an import."""


def from_config(
    config: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """Build the loader that a YAML file describes. Returns the loader and its sampler.

    >>> loader, sampler = from_config("train.yaml", batch_size=4, dp_rank=rank, dp_world_size=world)

    The description is under ``data: dataloader:``, under ``dataloader:`` or at the top. Its ``_target_`` names one of
    the two builders; all other fields are the builder's parameters.

    Args:
        config: The path of a YAML file, or its content as a dictionary.
        overrides: Parameters that replace those of the description or are added to them.
    """
    if not isinstance(config, (str, os.PathLike, Mapping)):
        raise ConfigError(f"a configuration is a path or a dictionary, not {config!r}")
    source = "the configuration" if isinstance(config, Mapping) else str(config)
    node = _dataloader_node(config if isinstance(config, Mapping) else _read_yaml(Path(config)), source)
    arguments = {**node, **overrides}
    target = arguments.pop("_target_", None)
    if not isinstance(target, str) or target not in _BUILDERS:
        raise ConfigError(f"{source}: _target_ is {target!r}; allowed are {', '.join(_BUILDERS)}")
    builder = _BUILDERS[target]
    known = inspect.signature(builder).parameters
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(known)}"
            raise ConfigError(f"{source}: {builder.__name__} has no parameter {name!r}; {hint}")
    if "cache_dir" not in arguments:
        raise ConfigError(f"{source}: cache_dir is missing; it must be the folder of a finished cache")
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


def _dataloader_node(config: Any, source: str) -> Mapping[str, Any]:
    node = config
    for key in ("data", "dataloader"):
        if isinstance(node, Mapping) and "_target_" not in node and key in node:
            node = node[key]
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{source} has no 'data: dataloader:' section with a _target_")
    return node
