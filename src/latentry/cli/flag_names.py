"""Errors in the user's words: the library speaks of arguments, and the user typed flags."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

_OTHER_NAMES = {"max_images": "max_files", "max_videos": "max_files"}
"""Flags whose argument in the library has another name."""


def in_flags(message: str, flags: Collection[str], typed: Sequence[str]) -> str:
    """The message with the names of arguments replaced by the flags of the command.

    >>> in_flags("max_files is 0", {"max_images"}, ["--max-images", "0"])
    '--max-images is 0'

    A name with an underscore is replaced wherever it stands alone. Other names are ordinary words, so they are
    replaced only where the message begins with them.

    Args:
        message: The text of an error.
        flags: The flags of the command, without dashes, with underscores.
        typed: What the user typed. A flag that was typed with hyphens is named with hyphens.
    """
    names = {flag: flag for flag in flags}
    names |= {name: flag for flag, name in _OTHER_NAMES.items() if flag in flags}
    for name, flag in sorted(names.items(), key=lambda item: -len(item[0])):
        words = rf"(?<![\w/.'\"-]){name}(?![\w/'\"-]|\.\w)" if "_" in name else rf"^{name}(?= (?:is|has) )"
        message = re.sub(words, _as_typed(flag, typed), message)
    return message


def _as_typed(flag: str, typed: Sequence[str]) -> str:
    hyphenated = "--" + flag.replace("_", "-")
    return hyphenated if any(text.partition("=")[0] == hyphenated for text in typed) else f"--{flag}"


def unused_flag(given: Collection[str], values: Mapping[str, object]) -> str | None:
    """What to say about a flag that has no effect beside the others; None if all have one.

    Args:
        given: The flags that the user typed, without dashes, with underscores.
        values: The values of all flags.
    """
    for flag, condition, reason in _UNUSED:
        if flag in given and all(values.get(name) == value for name, value in condition.items()):
            return f"--{flag} has no effect {reason}"
    return None


_UNUSED: tuple[tuple[str, Mapping[str, object], str], ...] = (
    ("shard_size", {"output_format": "packed"}, "with --output_format packed, which has no metadata shards"),
    ("devices", {"command": "verify", "decode": False}, "without --decode"),
    (
        "caption_field",
        {"caption_format": "txt"},
        "with --caption_format txt, whose files have no keys; leave out one of them",
    ),
    *(
        (
            "caption_lines",
            {"caption_format": name},
            f"with --caption_format {name}, which reads no text files; leave out one of them",
        )
        for name in ("sidecar", "jsonl", "csv", "meta_json")
    ),
)
"""Flag, the values with which it has no effect, and how to say so."""
