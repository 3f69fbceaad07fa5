"""Latentry: images, videos and captions as training-ready latents, served in a resumable order.

Importing this package imports nothing heavy: each public name is loaded when it is first used.
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
    from latentry.media.reader import VideoOptions as VideoOptions
    from latentry.serve.config import (
        build_text_to_image_multiresolution_dataloader as build_text_to_image_multiresolution_dataloader,
    )
    from latentry.serve.config import (
        build_video_multiresolution_dataloader as build_video_multiresolution_dataloader,
    )
    from latentry.serve.config import from_config as from_config
    from latentry.serve.dataset import BaseMultiresolutionDataset as BaseMultiresolutionDataset
    from latentry.serve.dataset import TextToImageDataset as TextToImageDataset
    from latentry.serve.dataset import TextToVideoDataset as TextToVideoDataset
    from latentry.serve.sampler import SequentialBucketSampler as SequentialBucketSampler

__version__ = "0.1.0"

_HOME = {
    "BaseMultiresolutionDataset": "serve.dataset",
    "CacheError": "errors",
    "ConfigError": "errors",
    "LatentryError": "errors",
    "MultiTierBucketCalculator": "buckets",
    "Recipe": "encode.recipe",
    "VideoOptions": "media.reader",
    "SequentialBucketSampler": "serve.sampler",
    "StateError": "errors",
    "TextToImageDataset": "serve.dataset",
    "TextToVideoDataset": "serve.dataset",
    "convert_cache": "cache.convert",
    "build_text_to_image_multiresolution_dataloader": "serve.config",
    "build_video_multiresolution_dataloader": "serve.config",
    "from_config": "serve.config",
    "prepare": "encode.prepare",
    "verify_cache": "encode.verify",
}
"""Where each public name lives."""

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"latentry.{_HOME[name]}"), name)
    if name in _HOME.values():
        return importlib.import_module(f"latentry.{name}")
    raise AttributeError(f"module 'latentry' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
