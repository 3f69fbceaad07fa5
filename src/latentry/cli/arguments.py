"""The arguments of every command, with their help texts.

Flags are spelled with underscores, as NeMo AutoModel documents them. Hyphens work too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

import latentry

_PRESETS = ("256p", "512p", "768p", "1024p", "1536p")


def parse_arguments(arguments: Sequence[str] | None, prog: str = "latentry") -> argparse.Namespace:
    """The arguments as a namespace; ``command`` names the command.

    >>> parse_arguments(["verify", "cache"]).command
    'verify'
    """
    parser = build_parser(prog)
    options = parser.parse_args(arguments)
    if options.list_processors:
        options.command = "processors"
    elif options.command is None:
        parser.error("name a command: image, video, verify, convert, processors, demo")
    return options


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line and exits with status 1, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser(prog: str = "latentry") -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(prog=prog, description="Turn images, videos and captions into training-ready latents.")
    parser.add_argument("--version", action="version", version=f"latentry {latentry.__version__}")
    _flag(parser, "--list_processors", action="store_true", help="list the processors and exit")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", parser_class=_Parser
    )
    _add_image(commands.add_parser("image", help="encode a folder of images into a cache"))
    _add_video(commands.add_parser("video", help="encode a folder of videos into a cache"))
    _add_verify(commands.add_parser("verify", help="check every sample of a finished cache"))
    _add_convert(
        commands.add_parser("convert", help="copy a cache into another format, such as packed shards")
    )
    commands.add_parser("processors", help="list the processors")
    _add_demo(commands.add_parser("demo", help="encode, train on and decode the example images and clip"))
    return parser


def _flag(parser: Any, name: str, **options: Any) -> None:
    """Add a flag that may be written with underscores or with hyphens."""
    hyphenated = "--" + name[2:].replace("_", "-")
    parser.add_argument(name, *([hyphenated] if hyphenated != name else []), **options)


def _add_image(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("input and output")
    _flag(
        files,
        "--image_dir",
        metavar="DIR",
        required=True,
        help="encode the images in this folder and its subfolders (required)",
    )
    _flag(
        files,
        "--max_images",
        metavar="N",
        type=int,
        help="encode only the first N, sorted by name (default: all)",
    )
    recipe = _add_common(parser, files, preset="256p", output_format="pt")
    _flag(
        recipe,
        "--crop_mode",
        metavar="MODE",
        default="center",
        help="crop at the center, at a random position, or where the detail is (smart) (default: center)",
    )


def _add_video(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("input and output")
    _flag(
        files,
        "--video_dir",
        metavar="DIR",
        required=True,
        help="encode the videos in this folder and its subfolders (required)",
    )
    _flag(
        files,
        "--max_videos",
        metavar="N",
        type=int,
        help="encode only the first N, sorted by name (default: all)",
    )
    recipe = _add_common(parser, files, preset="512p", output_format="meta")
    _flag(
        recipe,
        "--mode",
        metavar="MODE",
        default="video",
        help="make one sample per file (video) or one per extracted frame (frames) (default: video)",
    )
    _flag(
        recipe,
        "--num_frames",
        metavar="N",
        type=int,
        default=10,
        help="extract N evenly spaced frames per file with --mode frames (default: 10)",
    )
    _flag(
        recipe,
        "--target_frames",
        metavar="N",
        type=int,
        help="make every clip N frames long (default: the longest length that the file and the model allow)",
    )
    _flag(
        recipe,
        "--target_fps",
        metavar="FPS",
        type=float,
        help="sample frames at this rate from the start of the file (default: evenly over its whole length)",
    )
    _flag(
        recipe,
        "--short_clips",
        metavar="ACTION",
        default="skip",
        help="skip files shorter than --target_frames, or pad them with their last frame (default: skip)",
    )
    _flag(
        recipe,
        "--height",
        metavar="PIXELS",
        type=int,
        help="encode every clip at this height; needs --width (default: choose a bucket per clip)",
    )
    _flag(
        recipe,
        "--width",
        metavar="PIXELS",
        type=int,
        help="encode every clip at this width; needs --height (default: choose a bucket per clip)",
    )
    _flag(
        recipe,
        "--resize_mode",
        metavar="MODE",
        default="bilinear",
        help="resize frames with bilinear, bicubic, nearest, area or lanczos (default: bilinear)",
    )
    crop = recipe.add_mutually_exclusive_group()
    _flag(
        crop,
        "--center_crop",
        action="store_true",
        default=True,
        help="keep the aspect ratio and crop the center (default)",
    )
    _flag(
        crop,
        "--no_center_crop",
        dest="center_crop",
        action="store_false",
        help="stretch frames to the bucket without cropping",
    )
    _flag(
        recipe,
        "--deterministic",
        dest="stochastic",
        action="store_false",
        help="store the mean of the VAE's posterior (default)",
    )


def _add_common(parser: argparse.ArgumentParser, files: Any, *, preset: str, output_format: str) -> Any:
    """Add the flags that images and videos share, and return the group of recipe flags."""
    _flag(
        files,
        "--output_dir",
        metavar="DIR",
        required=True,
        help="write the cache to this folder, created if missing (required)",
    )
    recipe = parser.add_argument_group(
        "recipe", "A cache has one recipe: to change it, use another --output_dir or --overwrite."
    )
    _flag(
        recipe,
        "--processor",
        metavar="NAME",
        default="tiny",
        help="encode with this model family; `latentry processors` lists them (default: tiny, which is built in)",
    )
    _flag(
        recipe,
        "--model_name",
        metavar="MODEL",
        help="load this folder in the diffusers layout, or this hub name (default: the processor's own)",
    )
    size = recipe.add_mutually_exclusive_group()
    _flag(
        size,
        "--resolution_preset",
        choices=_PRESETS,
        help=f"limit samples to this resolution (default: {preset})",
    )
    _flag(
        size,
        "--max_pixels",
        metavar="N",
        type=int,
        help="limit samples to N pixels (default: by --resolution_preset)",
    )
    parser.set_defaults(default_preset=preset)
    _flag(
        recipe,
        "--caption_format",
        metavar="FORMAT",
        default="auto",
        help="read captions from sidecar, txt, jsonl or meta_json files (default: auto, which tries the first three)",
    )
    _flag(
        recipe,
        "--caption_field",
        metavar="KEY",
        help="read captions from this key (default: caption, or internvl in JSONL files of images)",
    )
    _flag(
        recipe,
        "--dtype",
        metavar="DTYPE",
        default="auto",
        help="compute in float32, float16 or bfloat16 (default: auto, bfloat16 on GPUs and float32 on the CPU)",
    )
    _flag(
        recipe,
        "--output_format",
        metavar="FORMAT",
        default=output_format,
        help="write meta, pt or safetensors files, or packed shards for a million samples and more "
        f"(default: {output_format})",
    )
    _flag(
        recipe,
        "--stochastic",
        action="store_true",
        help="sample the VAE's posterior instead of storing its mean",
    )
    _flag(
        recipe,
        "--seed",
        metavar="N",
        type=int,
        default=42,
        help="seed random crops and --stochastic (default: 42)",
    )
    _add_run_flags(parser)
    return recipe


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run")
    _flag(
        run,
        "--devices",
        metavar="DEVICES",
        default="auto",
        help="use cpu, or GPUs such as cuda:0,cuda:1 (default: auto, every GPU or else the CPU)",
    )
    _flag(
        run,
        "--batch_size",
        metavar="N",
        type=int,
        help="encode N samples together (default: as many as fit on the GPU; 1 on a CPU and for clips)",
    )
    _flag(
        run,
        "--shard_size",
        metavar="N",
        type=int,
        default=10_000,
        help="write N rows per metadata shard (default: 10000)",
    )
    _flag(
        run,
        "--verify",
        action="store_true",
        help="decode what this run encodes and report its PSNR; encode damaged samples again",
    )
    _flag(run, "--overwrite", action="store_true", help="replace a cache that another recipe made")
    _flag(run, "--dry_run", action="store_true", help="show the plan and write nothing")
    _add_output_flags(run)


def _add_output_flags(parser: Any, *, with_json: bool = True) -> None:
    _flag(parser, "--quiet", action="store_true", help="print errors only")
    if with_json:
        _flag(parser, "--json", action="store_true", help="print the result as JSON")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache_dir", help="check the cache in this folder")
    _flag(
        parser,
        "--decode",
        action="store_true",
        help="also load the cache's model, decode every latent and compare it with its input",
    )
    _flag(
        parser,
        "--devices",
        metavar="DEVICE",
        default="auto",
        help="decode on this device, such as cpu or cuda:0 (default: auto, the first GPU or else the CPU)",
    )
    _add_output_flags(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache_dir", help="read the cache in this folder, which is not changed")
    _flag(
        parser,
        "--output_dir",
        metavar="DIR",
        required=True,
        help="write the new cache to this folder, created if missing (required)",
    )
    _flag(
        parser,
        "--output_format",
        metavar="FORMAT",
        default="packed",
        help="write packed shards, or meta, pt or safetensors files (default: packed)",
    )
    _add_output_flags(parser, with_json=False)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    _flag(
        parser,
        "--output_dir",
        metavar="DIR",
        default="latentry_demo",
        help="write caches and a contact sheet to this folder, created if missing (default: latentry_demo)",
    )
