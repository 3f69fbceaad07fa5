"""The flags of ``latentry image`` and ``latentry video``, one module per topic.

Each module adds the flags of its topic to a parser, and turns the parsed values into fields of a ``Recipe`` or
arguments of ``prepare()``. Flags are spelled with underscores, as NeMo AutoModel documents them. Hyphens work too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_flag(parser: Any, name: str, **options: Any) -> None:
    """Add a flag that may be written with underscores or with hyphens.

    Args:
        parser: A parser, or a group of one.
        name: The flag with underscores, such as ``--image_dir``.
        options: What ``add_argument`` takes.
    """
    hyphenated = "--" + name[2:].replace("_", "-")
    parser.add_argument(name, *([hyphenated] if hyphenated != name else []), **options)


def whole_number(least: int) -> Callable[[str], int]:
    """The ``type`` of a flag that takes a whole number.

    >>> add_flag(parser, "--batch_size", type=whole_number(1))

    Args:
        least: The smallest number that is allowed.
    """

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is too small; it must be at least {least}")
        return number

    return parse
