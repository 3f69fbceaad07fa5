"""Latentry: images, videos and captions as training-ready latents, served in a resumable order.

Importing this package loads nothing heavy: each public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latentry.buckets import MultiTierBucketCalculator as MultiTierBucketCalculator
    from latentry.cache.convert import convert_cache as convert_cache
    from latentry.encode.prepare import prepare as prepare
    from latentry.encode.recipe import Recipe as Recipe
    from latentry.encode.verify import verify_cache as verify_cache
    from latentry.errors import CacheError as CacheError
    from latentry.errors import ConfigError as ConfigError
    from latentry.errors import LatentryError as LatentryError
    from latentry.errors import StateError as StateError
    from latentry.media.video_options import VideoOptions as VideoOptions
    from latentry.serve.config import TextToImageDataloaderConfig as TextToImageDataloaderConfig
    from latentry.serve.config import TextToImageDatasetConfig as TextToImageDatasetConfig
    from latentry.serve.config import TextToVideoDataloaderConfig as TextToVideoDataloaderConfig
    from latentry.serve.config import TextToVideoDatasetConfig as TextToVideoDatasetConfig
    from latentry.serve.config import (
        build_text_to_image_multiresolution_dataloader as build_text_to_image_multiresolution_dataloader,
    )
    from latentry.serve.config import (
        build_video_multiresolution_dataloader as build_video_multiresolution_dataloader,
    )
    from latentry.serve.dataloader_build import DiffusionDataloaderBuild as DiffusionDataloaderBuild
    from latentry.serve.dataset import BaseMultiresolutionDataset as BaseMultiresolutionDataset
    from latentry.serve.dataset import TextToImageDataset as TextToImageDataset
    from latentry.serve.dataset import TextToVideoDataset as TextToVideoDataset
    from latentry.serve.meta_files import MetaFilesDataloaderConfig as MetaFilesDataloaderConfig
    from latentry.serve.meta_files import MetaFilesDataset as MetaFilesDataset
    from latentry.serve.meta_files import MetaFilesDatasetConfig as MetaFilesDatasetConfig
    from latentry.serve.mock import MockWanDataloaderConfig as MockWanDataloaderConfig
    from latentry.serve.mock import MockWanDatasetConfig as MockWanDatasetConfig
    from latentry.serve.sampler import SequentialBucketSampler as SequentialBucketSampler
    from latentry.serve.yaml_config import from_config as from_config

from latentry import _old_names

__version__ = "0.2.0.dev0"

_HOME = {
    "BaseMultiresolutionDataset": "serve.dataset",
    "CacheError": "errors",
    "ConfigError": "errors",
    "DiffusionDataloaderBuild": "serve.dataloader_build",
    "LatentryError": "errors",
    "MetaFilesDataloaderConfig": "serve.meta_files",
    "MetaFilesDataset": "serve.meta_files",
    "MetaFilesDatasetConfig": "serve.meta_files",
    "MockWanDataloaderConfig": "serve.mock",
    "MockWanDatasetConfig": "serve.mock",
    "MultiTierBucketCalculator": "buckets",
    "Recipe": "encode.recipe",
    "SequentialBucketSampler": "serve.sampler",
    "StateError": "errors",
    "TextToImageDataloaderConfig": "serve.config",
    "TextToImageDataset": "serve.dataset",
    "TextToImageDatasetConfig": "serve.config",
    "TextToVideoDataloaderConfig": "serve.config",
    "TextToVideoDataset": "serve.dataset",
    "TextToVideoDatasetConfig": "serve.config",
    "VideoOptions": "media.video_options",
    "build_text_to_image_multiresolution_dataloader": "serve.config",
    "build_video_multiresolution_dataloader": "serve.config",
    "convert_cache": "cache.convert",
    "from_config": "serve.yaml_config",
    "prepare": "encode.prepare",
    "verify_cache": "encode.verify",
}
"""Public name to the module that defines it."""

_SUBMODULES = {"errors", "buckets"}
"""Modules that are reachable after ``import latentry`` alone, such as ``latentry.errors``."""

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _old_names.RENAMED_EXPORTS:
        name = _old_names.renamed_export(name)
    if name in _HOME:
        return getattr(importlib.import_module(f"latentry.{_HOME[name]}"), name)
    if name in _SUBMODULES or f"latentry.{name}" in _old_names.MOVED_MODULES:
        return importlib.import_module(f"latentry.{name}")
    raise AttributeError(f"module 'latentry' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
