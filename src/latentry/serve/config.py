"""The loader builders, and the loaders that YAML files describe."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from latentry.errors import ConfigError
from latentry.serve.collate import Batch, collate_fn_text_to_image, collate_fn_video
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
