"""One function per command: parsed arguments in, exit status out. The work is done elsewhere.

Each function imports what it needs when it is called. ``convert``, ``processors`` and ``verify`` without
``--decode`` need the core packages only; the others ask for ``latentry[encode]`` first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from latentry.cli.arguments import parse_arguments
from latentry.errors import ConfigError
from latentry.extras import require_extra
from latentry.report.progress import progress_display
from latentry.types import ProcessorInfo


def run_command(arguments: Sequence[str] | None, prog: str = "latentry") -> int:
    """Parse the arguments and run the command they name."""
    options = parse_arguments(arguments, prog)
    return _COMMANDS[options.command](options)


def _image(options: argparse.Namespace) -> int:
    require_extra("encode")
    return _prepare(
        options, {"crop_mode": options.crop_mode}, image_dir=options.image_dir, max_files=options.max_images
    )


def _video(options: argparse.Namespace) -> int:
    require_extra("encode")
    from latentry.media.reader import VideoOptions

    if (options.width is None) != (options.height is None):
        raise ConfigError("--height and --width go together; give both, or neither to use buckets")
    if options.width is not None and (options.resolution_preset or options.max_pixels):
        raise ConfigError("--height and --width fix the size; leave out --resolution_preset and --max_pixels")
    video = VideoOptions(
        mode=options.mode,
        num_frames=options.num_frames,
        target_frames=options.target_frames,
        target_fps=options.target_fps,
        short_clips=options.short_clips,
        resize_mode=options.resize_mode,
    )
    fields = {
        "crop_mode": "center" if options.center_crop else "none",
        "video": video,
        "size": None if options.width is None else (options.width, options.height),
    }
    return _prepare(options, fields, video_dir=options.video_dir, max_files=options.max_videos)


def _prepare(options: argparse.Namespace, recipe_fields: Mapping[str, Any], **inputs: Any) -> int:
    from rich.console import Console

    from latentry.buckets import MultiTierBucketCalculator
    from latentry.encode.prepare import prepare
    from latentry.encode.recipe import Recipe
    from latentry.hardware import find_devices

    preset = MultiTierBucketCalculator.RESOLUTION_PRESETS[options.resolution_preset or options.default_preset]
    recipe = Recipe(
        processor=options.processor,
        model_name=options.model_name,
        max_pixels=preset if options.max_pixels is None else options.max_pixels,
        caption_format=options.caption_format,
        caption_field=options.caption_field,
        dtype=options.dtype,
        output_format=options.output_format,
        stochastic=options.stochastic,
        seed=options.seed,
        **recipe_fields,
    )
    if not options.quiet and find_devices(options.devices) == ["cpu"]:
        print("no GPU in use: encoding on the CPU", file=sys.stderr)
    with progress_display(quiet=options.quiet or options.dry_run) as show:
        result = prepare(
            recipe,
            output_dir=options.output_dir,
            devices=options.devices,
            batch_size=options.batch_size,
            shard_size=options.shard_size,
            verify=options.verify,
            overwrite=options.overwrite,
            dry_run=options.dry_run,
            on_progress=lambda now: show(now.phase, now.done, now.total, now.failures, now.by_device),
            **inputs,
        )
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    elif not options.quiet:
        Console().print(result)
        for failure in result.failures if options.dry_run else ():
            print(f"{failure.name} {failure.reason}")
    return result.exit_status


def _verify(options: argparse.Namespace) -> int:
    if options.decode:
        require_extra("encode")
    from latentry.encode.verify import verify_cache

    with progress_display(quiet=options.quiet) as show:
        result = verify_cache(
            options.cache_dir,
            decode=options.decode,
            device=options.devices,
            on_progress=lambda done, total: show("verify", done, total),
        )
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    elif not options.quiet:
        print(result)
    return result.exit_status


def _convert(options: argparse.Namespace) -> int:
    from latentry.cache.convert import convert_cache

    with progress_display(quiet=options.quiet) as show:
        result = convert_cache(
            options.cache_dir,
            options.output_dir,
            options.output_format,
            on_progress=lambda done, total: show("convert", done, total),
        )
    if not options.quiet:
        print(result)
    return 0


def _demo(options: argparse.Namespace) -> int:
    require_extra("encode")
    from latentry.demo.walkthrough import run_demo

    return run_demo(Path(options.output_dir), run_command)


def _processors(options: argparse.Namespace) -> int:
    from latentry.processors import PROCESSORS, processor_class

    header = ("name", "media", "space", "time", "frames", "quantum", "default model name", "model")
    rows = [header, *(_row(processor_class(name).info) for name in PROCESSORS)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(info: ProcessorInfo) -> tuple[str, ...]:
    return (
        info.name,
        "/".join(info.media),
        f"{info.spatial_factor}x",
        f"{info.temporal_factor}x",
        info.frame_rule,
        str(info.quantum),
        info.default_model_name,
        info.model,
    )


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "image": _image,
    "video": _video,
    "verify": _verify,
    "convert": _convert,
    "processors": _processors,
    "demo": _demo,
}
