"""Where captions come from."""

from __future__ import annotations

import argparse
from typing import Any

from latentry.cli.flags import add_flag


def add_caption_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags about captions."""
    group = parser.add_argument_group("captions")
    add_flag(
        group,
        "--caption_format",
        metavar="FORMAT",
        default="auto",
        help="read captions from sidecar, txt, jsonl or meta_json files (default: auto, which tries the first three)",
    )
    add_flag(
        group,
        "--caption_field",
        metavar="KEY",
        help="read captions from this key (default: caption, or internvl in JSONL files of images)",
    )


def caption_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a ``Recipe`` that these flags give."""
    return {"caption_format": options.caption_format, "caption_field": options.caption_field}
