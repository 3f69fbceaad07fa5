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
    return group


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
    max_pixels = preset if options.max_pixels is None else options.max_pixels
    return {"max_pixels": max_pixels, "hdr": options.hdr}
