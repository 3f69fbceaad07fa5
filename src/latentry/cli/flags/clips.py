"""Which frames of a video become samples, and how they are scaled."""

from __future__ import annotations

import argparse
from typing import Any

from latentry.cli.flags import add_flag, whole_number
from latentry.errors import ConfigError


def add_clip_flags(parser: argparse.ArgumentParser, sizes: Any) -> None:
    """Add the flags about clips.

    Args:
        parser: The parser of ``latentry video``.
        sizes: The group of flags about sizes, which gets those that only videos have.
    """
    group = parser.add_argument_group("clips")
    add_flag(
        group,
        "--mode",
        choices=("video", "frames"),
        default="video",
        help="make one sample per file (video) or one per extracted frame (frames) (default: video)",
    )
    add_flag(
        group,
        "--num_frames",
        metavar="N",
        type=whole_number(1),
        default=10,
        help="extract N evenly spaced frames per file with --mode frames (default: 10)",
    )
    add_flag(
        group,
        "--target_frames",
        metavar="N",
        type=whole_number(1),
        help="make every clip N frames long (default: the longest length that the file and the model allow)",
    )
    add_flag(
        group,
        "--target_fps",
        metavar="FPS",
        type=float,
        help="sample frames at this rate from the start of the file (default: evenly over its whole length)",
    )
    add_flag(
        group,
        "--short_clips",
        choices=("skip", "pad"),
        default="skip",
        help="skip files shorter than --target_frames, or pad them with their last frame (default: skip)",
    )
    add_flag(
        sizes,
        "--height",
        metavar="PIXELS",
        type=whole_number(1),
        help="encode every clip at this height; needs --width (default: choose a bucket per clip)",
    )
    add_flag(
        sizes,
        "--width",
        metavar="PIXELS",
        type=whole_number(1),
        help="encode every clip at this width; needs --height (default: choose a bucket per clip)",
    )
    add_flag(
        sizes,
        "--resize_mode",
        choices=("bilinear", "bicubic", "nearest", "area", "lanczos"),
        default="bilinear",
        help="resize frames with bilinear, bicubic, nearest, area or lanczos (default: bilinear)",
    )
    crop = sizes.add_mutually_exclusive_group()
    add_flag(
        crop,
        "--center_crop",
        action="store_true",
        default=True,
        help="keep the aspect ratio and crop the center (default)",
    )
    add_flag(
        crop,
        "--no_center_crop",
        dest="center_crop",
        action="store_false",
        help="stretch frames to the bucket without cropping",
    )


def clip_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a ``Recipe`` that these flags give."""
    from latentry.media.video_options import VideoOptions

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
    return {
        "crop_mode": "center" if options.center_crop else "none",
        "video": video,
        "size": None if options.width is None else (options.width, options.height),
    }
