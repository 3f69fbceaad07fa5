"""Latentry: images, videos and captions as training-ready latents, served in a resumable order.

Importing this package imports nothing heavy: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latentry.buckets import MultiTierBucketCalculator as MultiTierBucketCalculator
    from latentry.conversion import convert_cache as convert_cache
    from latentry.datasets import BaseMultiresolutionDataset as BaseMultiresolutionDataset
    from latentry.datasets import TextToImageDataset as TextToImageDataset
    from latentry.datasets import TextToVideoDataset as TextToVideoDataset
    from latentry.errors import CacheError as CacheError
    from latentry.errors import ConfigError as ConfigError
    from latentry.errors import LatentryError as LatentryError
    from latentry.errors import StateError as StateError
    from latentry.loader import (
        build_text_to_image_multiresolution_dataloader as build_text_to_image_multiresolution_dataloader,
    )
    from latentry.loader import (
        build_video_multiresolution_dataloader as build_video_multiresolution_dataloader,
    )
    from latentry.loader import from_config as from_config
    from latentry.media.kinds import VideoChoices as VideoChoices
    from latentry.plan import Recipe as Recipe
    from latentry.preparation import prepare as prepare
    from latentry.sampler import SequentialBucketSampler as SequentialBucketSampler
    from latentry.verification import verify_cache as verify_cache

__version__ = "0.1.0"

_HOME = {
    "BaseMultiresolutionDataset": "datasets",
    "CacheError": "errors",
    "ConfigError": "errors",
    "LatentryError": "errors",
    "MultiTierBucketCalculator": "buckets",
    "Recipe": "plan",
    "VideoChoices": "media.kinds",
    "SequentialBucketSampler": "sampler",
    "StateError": "errors",
    "TextToImageDataset": "datasets",
    "TextToVideoDataset": "datasets",
    "convert_cache": "conversion",
    "build_text_to_image_multiresolution_dataloader": "loader",
    "build_video_multiresolution_dataloader": "loader",
    "from_config": "loader",
    "prepare": "preparation",
    "verify_cache": "verification",
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
