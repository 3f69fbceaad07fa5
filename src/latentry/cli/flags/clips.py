"""Which frames of a video become samples, and how they are scaled."""

from __future__ import annotations

import argparse
from typing import Any

from latentry.cli.flags import add_flag, whole_number
from latentry.errors import ConfigError
from latentry.extras import require_extra


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
        help="make one sample per window of a file (video) or one per extracted frame (frames) (default: video)",
    )
    add_flag(
        group,
        "--num_frames",
        metavar="N",
        type=whole_number(1),
        help="extract N evenly spaced frames per file; only with --mode frames (default: 10)",
    )
    add_flag(
        group,
        "--target_frames",
        metavar="N",
        type=whole_number(1),
        help="make every clip N frames long (default: as many as the file has and the model and --max_frames allow)",
    )
    add_flag(
        group,
        "--target_fps",
        metavar="FPS",
        type=float,
        help="take frames at this rate (default: take consecutive frames)",
    )
    add_flag(
        group,
        "--windows",
        choices=("head", "middle", "chunks", "slide", "uniform"),
        help="take the first window of --target_frames frames (head), the one in the middle (middle), all windows one "
        "after another (chunks) or one every --window_step_s seconds (slide), or spread the frames over the whole file "
        "(uniform) (default: head)",
    )
    add_flag(
        group,
        "--window_step_s",
        metavar="SECONDS",
        type=float,
        help="start a window at this interval; needed by --windows slide (default: none)",
    )
    add_flag(
        group,
        "--max_frames",
        metavar="N",
        type=whole_number(0),
        help="limit clips to N frames where --target_frames is not given; 0 removes the limit (default: 257)",
    )
    add_flag(
        group,
        "--split_scenes",
        action="store_true",
        help="find scene cuts and take windows from each scene; planning then decodes every file, and "
        "latentry[scenes] must be installed",
    )
    add_flag(
        group,
        "--short_clips",
        choices=("skip", "pad"),
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
    if options.split_scenes:
        require_extra("scenes")
    _check_mode(options)
    return {
        "crop_mode": "center" if options.center_crop else "none",
        "video": VideoOptions(mode=options.mode, resize_mode=options.resize_mode, **_given(options)),
        "size": None if options.width is None else (options.width, options.height),
    }


def _check_mode(options: argparse.Namespace) -> None:
    """Refuse flags that have no effect."""
    if options.mode == "frames":
        names = (
            "target_frames",
            "target_fps",
            "windows",
            "window_step_s",
            "max_frames",
            "split_scenes",
            "short_clips",
        )
        useless = [f"--{name}" for name in names if getattr(options, name) not in (None, False)]
        if useless:
            instead = ", or set --num_frames instead" if useless[0] == "--target_frames" else ""
            raise ConfigError(f"{useless[0]} has no effect with --mode frames; leave it out{instead}")
        return
    if options.num_frames is not None and not options.whole_clips:
        raise ConfigError("--num_frames has no effect without --mode frames; set --target_frames instead")
    if options.target_frames is None and options.short_clips is not None:
        raise ConfigError("--short_clips has no effect without --target_frames; leave it out, or give both")
    if options.target_frames is not None and options.max_frames is not None:
        raise ConfigError("--max_frames has no effect with --target_frames; leave one of them out")
    if options.windows in ("chunks", "slide") and options.target_frames is None:
        raise ConfigError(f"--windows {options.windows} needs --target_frames, the frames of each window")
    if options.windows == "slide" and options.window_step_s is None:
        raise ConfigError("--windows slide needs --window_step_s, the seconds from one window to the next")
    if options.windows != "slide" and options.window_step_s is not None:
        raise ConfigError("--window_step_s has no effect without --windows slide; leave it out, or give both")
    if options.windows == "uniform" and options.target_fps is not None:
        raise ConfigError(
            "--windows uniform spreads frames over the whole file, whatever the rate; leave out --target_fps"
        )


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The options of videos that the user gave; the others keep their defaults."""
    names = (
        "num_frames",
        "target_frames",
        "target_fps",
        "windows",
        "window_step_s",
        "max_frames",
        "short_clips",
    )
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.split_scenes:
        given["split_scenes"] = True
    if options.whole_clips and options.mode == "video":
        given.setdefault("windows", "head" if "target_fps" in given else "uniform")
        given.setdefault("max_frames", 0)
        given.setdefault("target_frames", given.pop("num_frames", None))  # what that command means by it
    if given.get("max_frames") == 0:
        given["max_frames"] = None
    return given
