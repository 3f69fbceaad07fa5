"""The flags of ``latentry image`` and ``latentry video``, one module per topic.

Each module adds the flags of its topic to a parser, and turns the parsed values into fields of a ``Recipe`` or
arguments of ``prepare()``. Flags are spelled with underscores, as NeMo AutoModel documents them. Hyphens work too.
"""

from __future__ import annotations

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
