"""A recipe with nothing left open, as a cache records it.

A later run with another resolved recipe is refused: a cache never mixes latents of two recipes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from latentry.cache.format import CAPTION_CHOICES, recipe_fingerprint
from latentry.encode.recipe import Recipe
from latentry.errors import ConfigError
from latentry.media.image_reader import ImageReader
from latentry.media.reader import MediaReader
from latentry.media.video_options import VideoOptions, with_old_defaults
from latentry.media.video_reader import VideoReader
from latentry.types import ProcessorInfo

RECIPE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRecipe:
    """A recipe with nothing left open, as it is recorded in a cache.

    A field that a later release adds has a default value, which gives what earlier releases did. It is recorded only
    where it differs from that, so that caches of earlier releases can still be added to.
    """

    recipe_version: int = RECIPE_VERSION
    processor: str
    processor_version: int
    weights: str
    """Identifies the model's weights."""
    max_pixels: int
    quantization: int
    crop_mode: str
    caption_format: str
    """Recorded, but later runs may have another one: captions can be changed in a cache."""
    caption_field: str | None
    """Recorded, but later runs may have another one."""
    dtype: str
    output_format: str
    stochastic: bool
    seed: int
    frame_step: int
    video: VideoOptions | None
    size: tuple[int, int] | None
    hdr: str = "tonemap"
    text_dtype: str = "auto"
    aspect_ratios: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def from_recorded(cls, recorded: Mapping[str, Any]) -> ResolvedRecipe:
        """The recipe that a cache's ``metadata.json`` records."""
        video, size, ratios = (recorded.get(name) for name in ("video", "size", "aspect_ratios"))
        try:
            return cls(
                **{
                    **recorded,
                    "video": VideoOptions.from_recorded(video) if video else None,
                    "size": tuple(size) if size else None,
                    "aspect_ratios": tuple((width, height) for width, height in ratios) if ratios else None,
                }
            )
        except TypeError as error:
            raise ConfigError(f"the cache's recipe was recorded by another release: {error}") from None

    @property
    def media(self) -> str:
        """``image`` or ``video``."""
        return "image" if self.video is None else "video"

    def media_reader(self) -> MediaReader:
        """The reader of this recipe's inputs."""
        if self.video is None:
            return ImageReader(self.crop_mode, hdr=self.hdr)
        return VideoReader(self.video, self.crop_mode, self.frame_step, self.hdr)

    def recorded(self) -> dict[str, Any]:
        """The recipe as a cache records it, without the fields that have their default value."""
        found = asdict(self)
        if self.video is not None:
            found["video"] = self.video.recorded()
        return {
            field.name: found[field.name]
            for field in fields(self)
            if field.default is MISSING
            or field.name == "recipe_version"
            or found[field.name] != field.default
        }

    @property
    def fingerprint(self) -> str:
        return recipe_fingerprint(self.recorded())

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """One line for each field in which a recorded recipe differs from this one."""
        mine = _flat(json.loads(json.dumps(self.recorded())))
        recorded = _flat(recorded)
        names = [*mine, *sorted(recorded.keys() - mine.keys())]
        return [
            f"{name} was {recorded.get(name)!r}, now {mine.get(name)!r}"
            for name in names
            if mine.get(name) != recorded.get(name) and name not in CAPTION_CHOICES
        ]


def _flat(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded recipe with its defaults filled in and the options of videos beside the others, as users give them."""
    defaults = {field.name: field.default for field in fields(ResolvedRecipe) if field.default is not MISSING}
    del defaults["recipe_version"]  # it is always recorded
    video = recorded.get("video")
    options = with_old_defaults(video) if isinstance(video, dict) else {}
    return {**defaults, **recorded, "video": bool(video), **options}


def resolve_recipe(recipe: Recipe, info: ProcessorInfo, weights: str, *, on_gpu: bool) -> ResolvedRecipe:
    """Fill in what the recipe leaves open.

    Args:
        recipe: The user's recipe.
        info: The processor's description.
        weights: Identifies the model's weights.
        on_gpu: Whether all devices of the run are GPUs, which decides the dtype ``auto``.
    """
    _check_sizes(recipe, info.quantum, info.temporal_factor)
    _check_bucket_step(recipe, info)
    if recipe.text_dtype not in info.text_dtypes:
        raise ConfigError(
            f"text_dtype is {recipe.text_dtype!r}, but {info.name} has no text encoder that can be quantised; leave "
            "it out"
        )
    dtype = recipe.dtype
    if dtype == "auto":
        dtype = "bfloat16" if on_gpu else "float32"
    return ResolvedRecipe(
        processor=recipe.processor,
        processor_version=info.version,
        weights=weights,
        max_pixels=recipe.max_pixels,
        quantization=recipe.bucket_step or info.quantum,
        crop_mode=recipe.crop_mode,
        caption_format=recipe.caption_format,
        caption_field=recipe.caption_field,
        dtype=dtype,
        output_format=recipe.output_format,
        stochastic=recipe.stochastic,
        seed=recipe.seed,
        frame_step=info.temporal_factor,
        video=recipe.video,
        size=recipe.size,
        hdr=recipe.hdr,
        text_dtype=recipe.text_dtype,
        aspect_ratios=recipe.bucket_shapes(),
    )


def _check_sizes(recipe: Recipe, quantum: int, frame_step: int) -> None:
    """Check that a given size and number of frames fit the model; errors name the nearest that do."""
    if recipe.size is not None:
        width, height = recipe.size
        near = [max(quantum, round(side / quantum) * quantum) for side in recipe.size]
        if [width, height] != near:
            raise ConfigError(
                f"width {width} and height {height} must be multiples of {quantum}; the nearest is "
                f"{near[0]}x{near[1]}"
            )
    frames = recipe.video and recipe.video.target_frames
    if frames and (frames - 1) % frame_step:
        below = (frames - 1) // frame_step * frame_step + 1
        raise ConfigError(
            f"target_frames is {frames}, but this model takes {frame_step}n+1; the nearest are {below} and "
            f"{below + frame_step}"
        )


def _check_bucket_step(recipe: Recipe, info: ProcessorInfo) -> None:
    """Check that buckets on this grid are whole tokens of the model; the error names the nearest steps that are."""
    step, unit = recipe.bucket_step, info.min_quantum
    if step is None or (step > 0 and step % unit == 0):
        return
    below = step // unit * unit
    nearest = f"the nearest are {below} and {below + unit}" if below > 0 else f"the smallest is {unit}"
    raise ConfigError(f"bucket_step is {step}, but {info.name} needs a multiple of {unit}; {nearest}")
