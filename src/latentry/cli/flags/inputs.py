"""Where inputs come from, and where the cache goes."""

from __future__ import annotations

import argparse
from typing import Any

from latentry.cli.flags import add_flag, whole_number


def add_input_flags(parser: argparse.ArgumentParser, media: str) -> None:
    """Add the flags that name folders.

    Args:
        parser: The parser of ``latentry image`` or ``latentry video``.
        media: ``image`` or ``video``.
    """
    group = parser.add_argument_group("input and output")
    add_flag(
        group,
        f"--{media}_dir",
        metavar="DIR",
        nargs="+",
        action="extend",
        required=True,
        help=f"encode the {media}s in these folders and their subfolders (required)",
    )
    add_flag(
        group,
        "--repeats",
        metavar="N",
        nargs="+",
        action="extend",
        type=int,
        help="have the samples of each folder N times per epoch, with one N for each folder (default: once)",
    )
    add_flag(
        group,
        f"--max_{media}s",
        metavar="N",
        type=whole_number(1),
        help="encode only the first N, folder by folder and sorted by name in each (default: all)",
    )
    add_flag(
        group,
        "--output_dir",
        metavar="DIR",
        required=True,
        help="write the cache to this folder, created if missing (required)",
    )


def input_arguments(options: argparse.Namespace, media: str) -> dict[str, Any]:
    """The arguments of ``prepare()`` that these flags give."""
    folder = f"{media}_dir"
    return {
        folder: getattr(options, folder),
        "repeats": options.repeats,
        "max_files": getattr(options, f"max_{media}s"),
        "output_dir": options.output_dir,
    }
