"""A recipe: everything that decides the bytes of a cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from latentry.buckets import MultiTierBucketCalculator
from latentry.cache.format import OUTPUT_FORMATS, recipe_fingerprint
from latentry.crops import CROP_MODES
from latentry.errors import ConfigError
from latentry.media.images import NO_CROP
from latentry.media.reader import ImageReader, MediaReader, VideoOptions, VideoReader
from latentry.sources.captions import CAPTION_FORMATS

DTYPES = ("auto", "float32", "float16", "bfloat16")
RECIPE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides the bytes of a cache.

    >>> Recipe(processor="flux", max_pixels=1024 * 1024)
    """

    processor: str = "tiny"
    model_name: str | None = None
    """A folder in the diffusers layout or a hub name; None is the processor's default."""
    max_pixels: int = 256 * 256
    """The resolution budget; ``MultiTierBucketCalculator.RESOLUTION_PRESETS`` has names for some."""
    crop_mode: str = "center"
    caption_format: str = "auto"
    caption_field: str | None = None
    dtype: str = "auto"
    """What the model computes in; ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    output_format: str = "pt"
    stochastic: bool = False
    """Sample the VAE's posterior, with a seed per sample, instead of taking its mean."""
    seed: int = 42
    """For random crops and stochastic latents."""
    video: VideoOptions | None = None
    """Which frames of clips are taken; None is for images."""
    size: tuple[int, int] | None = None
    """(width, height) for every sample, instead of buckets under ``max_pixels``."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("crop_mode", self.crop_mode, (*CROP_MODES, NO_CROP)),
            ("caption_format", self.caption_format, CAPTION_FORMATS),
            ("dtype", self.dtype, DTYPES),
            ("output_format", self.output_format, OUTPUT_FORMATS),
        ):
            if value not in allowed:
                raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(allowed)}")
        for name, number in (("max_pixels", self.max_pixels), ("seed", self.seed)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ConfigError(f"{name} is {number!r}; it must be a whole number, 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRecipe:
    """A recipe with nothing left open, as it is recorded in a cache."""

    recipe_version: int = RECIPE_VERSION
    processor: str
    processor_version: int
    weights: str
    """The identity of the model's weights."""
    max_pixels: int
    quantization: int
    crop_mode: str
    caption_format: str
    caption_field: str | None
    dtype: str
    output_format: str
    stochastic: bool
    seed: int
    frame_step: int
    video: VideoOptions | None
    size: tuple[int, int] | None

    @property
    def media(self) -> str:
        return "image" if self.video is None else "video"

    def media_reader(self) -> MediaReader:
        """The reader of this recipe's inputs."""
        if self.video is None:
            return ImageReader(self.crop_mode)
        return VideoReader(self.video, self.crop_mode, self.frame_step)

    @property
    def fingerprint(self) -> str:
        return recipe_fingerprint(asdict(self))

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """One line per field in which a recorded recipe differs from this one."""
        mine = json.loads(json.dumps(asdict(self)))
        names = sorted(
            set(mine) | set(other), key=lambda name: list(mine).index(name) if name in mine else 99
        )
        return [
            f"{n} was {other.get(n)!r}, now {mine.get(n)!r}" for n in names if mine.get(n) != other.get(n)
        ]


BucketChooser = Callable[[Sequence[tuple[int, int]]], Sequence[tuple[int | None, tuple[int, int]]]]
"""Bucket id and (width, height) for each of some sizes."""


def bucket_chooser(recipe: ResolvedRecipe) -> BucketChooser:
    """Buckets under the recipe's budget, or its one size for all."""
    if recipe.size is not None:
        fixed: tuple[int | None, tuple[int, int]] = (None, recipe.size)
        return lambda sizes: [fixed] * len(sizes)
    calculator = MultiTierBucketCalculator(recipe.quantization, recipe.max_pixels)

    def choose(sizes: Sequence[tuple[int, int]]) -> list[tuple[int | None, tuple[int, int]]]:
        table = np.array(sizes, dtype=np.int64).reshape(-1, 2)
        ids = calculator.assign(table[:, 0], table[:, 1]).tolist()
        return [(number, calculator.get_bucket_by_id(number)["resolution"]) for number in ids]

    return choose
