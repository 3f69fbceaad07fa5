"""``python -m tools.diffusion.preprocessing_multiprocess image …``, as documented, and the same as functions.

The parameters of the functions have the names of the flags. Both call ``latentry.prepare``, and return its result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from latentry.buckets import MultiTierBucketCalculator
from latentry.cli import main as run_latentry
from latentry.errors import ConfigError
from latentry.extras import require_extra

if TYPE_CHECKING:
    from latentry.report.summary import PrepareResult

__all__ = ["preprocess_dataset", "preprocess_video_dataset"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command as that tool does: the frames of a clip are spread over the whole clip."""
    return run_latentry(arguments, prog="preprocessing_multiprocess", whole_clips=True)


def preprocess_dataset(
    image_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    processor: str,
    *,
    model_name: str | None = None,
    resolution_preset: str | None = None,
    max_pixels: int | None = None,
    caption_field: str | None = None,
    shard_size: int = 10_000,
    max_images: int | None = None,
    verify: bool = False,
) -> PrepareResult:
    """Encode a folder of images: ``preprocess_dataset("photos", "cache", "flux", resolution_preset="512p")``."""
    require_extra("encode")
    from latentry import Recipe, prepare

    recipe = Recipe(
        processor=processor,
        model_name=model_name,
        max_pixels=_max_pixels(resolution_preset, max_pixels, "256p"),
        caption_field=caption_field,
    )
    return prepare(
        recipe,
        image_dir=image_dir,
        output_dir=output_dir,
        shard_size=shard_size,
        max_files=max_images,
        verify=verify,
    )


def preprocess_video_dataset(
    video_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    processor: str,
    *,
    model_name: str | None = None,
    mode: str = "video",
    num_frames: int = 10,
    target_frames: int | None = None,
    resolution_preset: str | None = None,
    max_pixels: int | None = None,
    height: int | None = None,
    width: int | None = None,
    resize_mode: str = "bilinear",
    center_crop: bool = True,
    caption_format: str = "auto",
    caption_field: str | None = None,
    output_format: str = "meta",
    deterministic: bool = True,
    shard_size: int = 10_000,
    max_videos: int | None = None,
) -> PrepareResult:
    """Encode a folder of videos: ``preprocess_video_dataset("clips", "cache", "wan", target_frames=81)``."""
    require_extra("encode")
    from latentry import Recipe, VideoOptions, prepare

    if (height is None) != (width is None):
        raise ConfigError("height and width go together; give both, or neither to use buckets")
    if height is not None and (resolution_preset or max_pixels):
        raise ConfigError("height and width fix the size; leave out resolution_preset and max_pixels")
    recipe = Recipe(
        processor=processor,
        model_name=model_name,
        max_pixels=_max_pixels(resolution_preset, max_pixels, "512p"),
        size=None if width is None or height is None else (width, height),
        crop_mode="center" if center_crop else "none",
        caption_format=caption_format,
        caption_field=caption_field,
        output_format=output_format,
        stochastic=not deterministic,
        video=VideoOptions(
            mode=mode,
            num_frames=num_frames,
            target_frames=target_frames,
            windows="uniform" if mode == "video" else "head",
            max_frames=None,
            resize_mode=resize_mode,
        ),
    )
    return prepare(
        recipe, video_dir=video_dir, output_dir=output_dir, shard_size=shard_size, max_files=max_videos
    )


def _max_pixels(preset: str | None, max_pixels: int | None, default: str) -> int:
    presets = MultiTierBucketCalculator.RESOLUTION_PRESETS
    if preset is not None and max_pixels is not None:
        raise ConfigError("resolution_preset and max_pixels are alternatives; leave out one of them")
    if preset is not None and preset not in presets:
        raise ConfigError(f"unknown resolution_preset {preset!r}; choose one of {', '.join(presets)}")
    return max_pixels if max_pixels is not None else presets[preset or default]


if __name__ == "__main__":
    sys.exit(main())
