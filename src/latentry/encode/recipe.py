"""The recipe: everything that decides the content of a cache, up to rounding.

Users write a ``Recipe``. A run resolves it, so that nothing is left open, and records the result in the cache. A
later run with another resolved recipe is refused: a cache never mixes latents of two recipes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from latentry.buckets import parse_aspect_ratio
from latentry.cache.format import CAPTION_CHOICES, OUTPUT_FORMATS, recipe_fingerprint
from latentry.crops import CROP_MODES
from latentry.encode.planning.sizes import SizeRules
from latentry.errors import ConfigError
from latentry.media.hdr import HDR_MODES
from latentry.media.image_reader import ImageReader
from latentry.media.images import NO_CROP
from latentry.media.reader import MediaReader
from latentry.media.video_options import VideoOptions, with_old_defaults
from latentry.media.video_reader import VideoReader
from latentry.processors import canonical_name
from latentry.sources.captions import CAPTION_FALLBACKS, CAPTION_FORMATS, CaptionFinder
from latentry.types import ProcessorInfo

DTYPES = ("auto", "float32", "float16", "bfloat16")
TEXT_DTYPES = ("auto", "fp8")
RECIPE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides the content of a cache, up to rounding.

    The last bits also depend on the device, the memory budget and the batch size.

    >>> Recipe(processor="flux", max_pixels=1024 * 1024)
    """

    processor: str = "tiny"
    """The model family; ``latentry processors`` lists them. An alias is replaced by the name it stands for."""
    model_name: str | None = None
    """A folder in the diffusers layout or a hub name; None is the processor's default."""
    max_pixels: int = 256 * 256
    """The resolution budget; ``MultiTierBucketCalculator.RESOLUTION_PRESETS`` names some."""
    crop_mode: str = "center"
    """How an image is cut to its bucket: ``center``, ``random``, ``smart``, or ``none`` to scale without cropping."""
    caption_format: str = "auto"
    """Where captions come from: ``auto``, ``sidecar``, ``txt``, ``jsonl``, ``csv`` or ``meta_json``."""
    caption_field: str | None = None
    """The key of a caption, or several keys separated by commas; None is ``caption`` in JSON files, and ``internvl``
    in JSONL files of images."""
    caption_required: bool = False
    """Whether an input without a caption is a failure."""
    caption_fallback: str = "filename"
    """What an input without a caption gets: its ``filename``, an ``empty`` caption, or ``skip`` to leave it out."""
    caption_prefix: str = ""
    """Put before every caption, as it is."""
    caption_suffix: str = ""
    """Put after every caption, as it is."""
    caption_lines: bool = False
    """Take each line of a text file as a caption."""
    dtype: str = "auto"
    """What the model computes in: ``auto``, ``float32``, ``float16`` or ``bfloat16``. ``auto`` is bfloat16 on a GPU
    and float32 on a CPU."""
    text_dtype: str = "auto"
    """What the weights of text encoders are stored in: ``auto`` for what the model computes in, or ``fp8`` for 8 bits,
    which takes half the memory and gives other embeddings."""
    output_format: str = "pt"
    """``pt``, ``meta`` or ``safetensors`` for one file per sample, ``packed`` for shards."""
    stochastic: bool = False
    """Sample the VAE's posterior, with a seed per sample, instead of taking its mean."""
    seed: int = 42
    """For random crops and stochastic latents."""
    video: VideoOptions | None = None
    """Which frames of a video are used; None is for images."""
    size: tuple[int, int] | None = None
    """(width, height) of every sample, instead of buckets under ``max_pixels``."""
    hdr: str = "tonemap"
    """What becomes of HDR inputs (PQ, HLG): ``tonemap`` converts them to sRGB, ``skip`` reports them as failures."""
    bucket_step: int | None = None
    """Bucket sides are multiples of this many pixels; None is the processor's own step."""
    aspect_ratios: Sequence[str] | None = None
    """The shapes of buckets, such as ``("1:1", "4:3", "3:4")``; None is the standard ones."""
    min_pixels: int | None = None
    """Leave out inputs with fewer pixels."""
    min_side: int | None = None
    """Leave out inputs whose shorter side has fewer pixels."""
    max_upscale: float | None = None
    """Leave out inputs that would be scaled up by a larger factor; 1 allows no upscaling."""
    max_crop: float | None = None
    """Leave out inputs of which cropping would lose a larger share, from 0 to 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "processor", canonical_name(self.processor))
        for name, value, allowed in (
            ("crop_mode", self.crop_mode, (*CROP_MODES, NO_CROP)),
            ("caption_format", self.caption_format, CAPTION_FORMATS),
            ("caption_fallback", self.caption_fallback, CAPTION_FALLBACKS),
            ("dtype", self.dtype, DTYPES),
            ("text_dtype", self.text_dtype, TEXT_DTYPES),
            ("output_format", self.output_format, OUTPUT_FORMATS),
            ("hdr", self.hdr, HDR_MODES),
        ):
            if value not in allowed:
                raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(allowed)}")
        for name, number in (("max_pixels", self.max_pixels), ("seed", self.seed)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ConfigError(f"{name} is {number!r}; it must be a whole number, 0 or more")
        if self.caption_required and self.caption_fallback != "filename":
            raise ConfigError(
                f"caption_required makes an input without a caption a failure, but caption_fallback is "
                f"{self.caption_fallback!r}; leave out one of them"
            )
        for name, given in (("bucket_step", self.bucket_step), ("aspect_ratios", self.aspect_ratios)):
            if given is not None and self.size is not None:
                raise ConfigError(
                    f"{name} has no effect with a fixed width and height; leave out one of them"
                )
        self.bucket_shapes()
        self.size_rules()

    def bucket_shapes(self) -> tuple[tuple[int, int], ...] | None:
        """The aspect ratios in lowest terms, tallest first, each once; None for the standard ones."""
        if self.aspect_ratios is None:
            return None
        found = {parse_aspect_ratio(text) for text in self.aspect_ratios}
        if not found:
            raise ConfigError("aspect_ratios is empty; give at least one, such as 1:1")
        return tuple(sorted(found, key=lambda ratio: ratio[0] / ratio[1]))

    def size_rules(self) -> SizeRules:
        """Which inputs are taken, by their size. A later run may choose others."""
        return SizeRules(
            crop_mode=self.crop_mode,
            min_pixels=self.min_pixels,
            min_side=self.min_side,
            max_upscale=self.max_upscale,
            max_crop=self.max_crop,
        )

    @property
    def media(self) -> str:
        """``image`` or ``video``."""
        return "image" if self.video is None else "video"

    def caption_finder(self, root: Path) -> CaptionFinder:
        """Finds captions as this recipe says.

        Args:
            root: A folder of the inputs.
        """
        return CaptionFinder(
            root,
            self.caption_format,
            self.caption_field,
            "internvl" if self.video is None else "caption",
            fallback=self.caption_fallback,
            required=self.caption_required,
            prefix=self.caption_prefix,
            suffix=self.caption_suffix,
            lines=self.caption_lines,
        )


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
