"""The recipe: everything that decides the content of a cache, up to rounding.

Users write a ``Recipe``. A run resolves it (``resolved_recipe``), so that nothing is left open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from latentry.buckets import parse_aspect_ratio
from latentry.cache.format import OUTPUT_FORMATS
from latentry.crops import CROP_MODES
from latentry.encode.planning.sizes import SizeRules
from latentry.errors import ConfigError
from latentry.media.hdr import HDR_MODES
from latentry.media.images import NO_CROP
from latentry.media.video_options import VideoOptions
from latentry.processors import canonical_name
from latentry.sources.captions import CAPTION_FALLBACKS, CAPTION_FORMATS, CaptionFinder

DTYPES = ("auto", "float32", "float16", "bfloat16")
TEXT_DTYPES = ("auto", "fp8")


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
