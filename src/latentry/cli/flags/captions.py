"""Where captions come from, and what becomes of them."""

from __future__ import annotations

import argparse
from typing import Any

from latentry.cli.flags import add_flag
from latentry.errors import ConfigError

_FIELDS = (
    "caption_format",
    "caption_field",
    "caption_required",
    "caption_fallback",
    "caption_prefix",
    "caption_suffix",
    "caption_lines",
)


def add_caption_flags(parser: argparse.ArgumentParser, *, lines_field: str) -> None:
    """Add the flags about captions.

    Args:
        parser: The parser of ``latentry image`` or ``latentry video``.
        lines_field: The key of captions in JSONL files.
    """
    group = parser.add_argument_group("captions")
    add_flag(
        group,
        "--caption_format",
        choices=("auto", "sidecar", "txt", "jsonl", "csv", "meta_json"),
        default="auto",
        help="read captions from sidecar, txt, jsonl, csv or meta_json files "
        "(default: auto, which tries all of them in this order)",
    )
    other = "" if lines_field == "caption" else f", or {lines_field} in JSONL and CSV files"
    add_flag(
        group,
        "--caption_field",
        metavar="KEYS",
        help=f"read captions from this key, or from several separated by commas (default: caption{other})",
    )
    add_flag(
        group,
        "--caption_lines",
        action="store_true",
        help="take each line of a text file as a caption (default: the whole file is one)",
    )
    add_flag(
        group,
        "--caption_required",
        action="store_true",
        help="report inputs without a caption as failures (default: see --caption_fallback)",
    )
    add_flag(
        group,
        "--caption_fallback",
        choices=("filename", "empty", "skip"),
        default="filename",
        help="give inputs without a caption their filename or an empty caption, or skip them (default: filename)",
    )
    add_flag(
        group,
        "--caption_prefix",
        metavar="TEXT",
        default="",
        help="put TEXT before every caption (default: none)",
    )
    add_flag(
        group,
        "--caption_suffix",
        metavar="TEXT",
        default="",
        help="put TEXT after every caption (default: none)",
    )


def caption_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a ``Recipe`` that these flags give."""
    if options.caption_required and options.caption_fallback != "filename":
        raise ConfigError(
            f"--caption_required and --caption_fallback {options.caption_fallback} contradict each other; leave out "
            "one of them"
        )
    return {name: getattr(options, name) for name in _FIELDS}
