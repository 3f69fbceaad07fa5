"""The arguments of every command, with their help texts.

The flags of ``image`` and ``video`` are in ``flags/``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

import latentry
from latentry.cli.flag_names import unused_flag
from latentry.cli.flags import add_flag
from latentry.cli.flags.captions import add_caption_flags
from latentry.cli.flags.clips import add_clip_flags
from latentry.cli.flags.encoding import add_encoding_flags
from latentry.cli.flags.inputs import add_input_flags
from latentry.cli.flags.run import add_output_flags, add_run_flags
from latentry.cli.flags.sizes import add_crop_mode_flag, add_size_flags


def parse_arguments(arguments: Sequence[str] | None, prog: str = "latentry") -> argparse.Namespace:
    """The arguments as a namespace; ``command`` names the command, and ``given`` has the flags that were typed.

    >>> parse_arguments(["verify", "cache"]).command
    'verify'
    """
    parser = build_parser(prog)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        nearest = subparsers(parser).get(options.command, parser)
        nearest.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.list_processors:
        options.command = "processors"
    elif options.command is None:
        parser.error(f"name a command: {', '.join(subparsers(parser))}")
    options.given = _given(arguments, prog)
    if problem := unused_flag(options.given, vars(options)):
        subparsers(parser)[options.command].error(problem)
    return options


def _given(arguments: Sequence[str] | None, prog: str) -> frozenset[str]:
    """The names of the arguments that were typed: those that a parser without defaults finds."""
    parser = build_parser(prog)
    for each in (parser, *subparsers(parser).values()):
        each._defaults.clear()
        for action in each._actions:
            action.default = argparse.SUPPRESS
    return frozenset(vars(parser.parse_args(arguments)))


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line and exits with status 1, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser(prog: str = "latentry") -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(prog=prog, description="Turn images, videos and captions into training-ready latents.")
    parser.add_argument("--version", action="version", version=f"latentry {latentry.__version__}")
    add_flag(parser, "--list_processors", action="store_true", help="list the processors and exit")
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
    _add_completion(
        commands.add_parser("completion", help="print a script that completes commands and flags")
    )
    _add_demo(commands.add_parser("demo", help="encode, train on and decode the example images and clip"))
    return parser


def _add_image(parser: argparse.ArgumentParser) -> None:
    add_input_flags(parser, "image")
    add_encoding_flags(parser, "image", output_format="pt")
    sizes = add_size_flags(parser, preset="256p")
    add_crop_mode_flag(sizes)
    add_caption_flags(parser, lines_field="internvl")
    add_run_flags(parser)


def _add_video(parser: argparse.ArgumentParser) -> None:
    add_input_flags(parser, "video")
    add_encoding_flags(parser, "video", output_format="meta")
    sizes = add_size_flags(parser, preset="512p")
    add_clip_flags(parser, sizes)
    add_caption_flags(parser, lines_field="caption")
    add_run_flags(parser)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache_dir", help="check the cache in this folder")
    add_flag(
        parser,
        "--decode",
        action="store_true",
        help="also load the cache's model, decode every latent and compare it with its input",
    )
    add_flag(
        parser,
        "--devices",
        metavar="DEVICE",
        default="auto",
        help="decode on this device, such as cpu, cuda:0, xpu:0 or mps (default: auto, the first GPU or else the CPU)",
    )
    add_output_flags(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache_dir", help="read the cache in this folder, which is not changed")
    add_flag(
        parser,
        "--output_dir",
        metavar="DIR",
        required=True,
        help="write the new cache to this folder, created if missing (required)",
    )
    add_flag(
        parser,
        "--output_format",
        choices=("packed", "meta", "pt", "safetensors"),
        default="packed",
        help="write packed shards, or meta, pt or safetensors files (default: packed)",
    )
    add_output_flags(parser)


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="print the script for this shell")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add_flag(
        parser,
        "--output_dir",
        metavar="DIR",
        default="latentry_demo",
        help="write caches and a contact sheet to this folder, created if missing (default: latentry_demo)",
    )
