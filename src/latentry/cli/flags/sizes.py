"""The sizes of samples, how inputs are cut to them, and what becomes of HDR."""

from __future__ import annotations

import argparse
from typing import Any

from latentry.cli.flags import add_flag, whole_number

_PRESETS = ("256p", "512p", "768p", "1024p", "1536p")


def add_size_flags(parser: argparse.ArgumentParser, *, preset: str) -> Any:
    """Add the flags about sizes, and return their group.

    Args:
        parser: The parser of ``latentry image`` or ``latentry video``.
        preset: The resolution that is used where the user names none.
    """
    group = parser.add_argument_group("sizes")
    size = group.add_mutually_exclusive_group()
    add_flag(
        size,
        "--resolution_preset",
        choices=_PRESETS,
        help=f"limit samples to this resolution (default: {preset})",
    )
    add_flag(
        size,
        "--max_pixels",
        metavar="N",
        type=whole_number(1),
        help="limit samples to N pixels (default: by --resolution_preset)",
    )
    add_flag(
        group,
        "--hdr",
        choices=("tonemap", "skip"),
        default="tonemap",
        help="convert HDR inputs to sRGB (tonemap) or report them as failures (skip) (default: tonemap)",
    )
    parser.set_defaults(default_preset=preset)
    _add_bucket_flags(group)
    _add_limit_flags(group)
    return group


def _add_bucket_flags(group: Any) -> None:
    add_flag(
        group,
        "--bucket_step",
        metavar="PIXELS",
        type=int,
        help="make the sides of buckets multiples of this (default: the processor's quantum)",
    )
    add_flag(
        group,
        "--aspect_ratios",
        metavar="RATIOS",
        help="make buckets of these shapes only, such as 1:1,4:3,3:4 (default: 14 usual shapes from 1:2 to 21:9)",
    )


def _add_limit_flags(group: Any) -> None:
    add_flag(
        group,
        "--min_pixels",
        metavar="N",
        type=int,
        help="leave out inputs with fewer than N pixels (default: no limit)",
    )
    add_flag(
        group,
        "--min_side",
        metavar="PIXELS",
        type=int,
        help="leave out inputs whose shorter side is shorter than this (default: no limit)",
    )
    add_flag(
        group,
        "--max_upscale",
        metavar="FACTOR",
        type=float,
        help="leave out inputs that would be scaled up more, 1 for no upscaling (default: no limit, warn above 2)",
    )
    add_flag(
        group,
        "--max_crop",
        metavar="SHARE",
        type=float,
        help="leave out inputs of which cropping would lose a larger share, 0 to 1 (default: no limit, warn above "
        "0.5)",
    )


def add_crop_mode_flag(group: Any) -> None:
    """Add the flag that says where images are cropped."""
    add_flag(
        group,
        "--crop_mode",
        choices=("center", "random", "smart", "none"),
        default="center",
        help="crop at the center, at a random position, where the detail is (smart), or stretch instead (none) "
        "(default: center)",
    )


def size_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a ``Recipe`` that these flags give."""
    from latentry.buckets import MultiTierBucketCalculator

    preset = MultiTierBucketCalculator.RESOLUTION_PRESETS[options.resolution_preset or options.default_preset]
    ratios = options.aspect_ratios
    names = ("hdr", "bucket_step", "min_pixels", "min_side", "max_upscale", "max_crop")
    return {
        "max_pixels": preset if options.max_pixels is None else options.max_pixels,
        "aspect_ratios": None if ratios is None else tuple(ratios.split(",")),
        **{name: getattr(options, name) for name in names},
    }
