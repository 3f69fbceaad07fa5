"""How a sample stores several captions.

The first caption has the documented keys, so that every reader finds it. The tensors of further captions have the same
keys with their number: ``prompt_embeds@1``. ``prompts`` lists all texts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from latentry.seeds import derived_seed

PROMPTS = "prompts"
"""The key of all texts, in files and rows of samples with several captions."""

T = TypeVar("T")


def caption_key(name: str, number: int) -> str:
    """The key of a tensor of this caption: ``caption_key("prompt_embeds", 1)`` is ``"prompt_embeds@1"``."""
    return f"{name}@{number}" if number else name


def split_caption_key(key: str) -> tuple[str, int]:
    """The opposite of ``caption_key``."""
    name, _, number = key.rpartition("@")
    return (name, int(number)) if name and number.isascii() and number.isdecimal() else (key, 0)


def num_captions(values: Mapping[str, Any]) -> int:
    """How many captions a sample has, by its file's or its row's values."""
    prompts = values.get(PROMPTS)
    return len(prompts) if isinstance(prompts, (list, tuple)) and prompts else 1


def drawn_caption(draw: int | None, file_name: str, row: Mapping[str, Any], num_captions: int) -> int:
    """Which caption of a sample is read: a pure function, the same for files and shards and on every machine.

    Args:
        draw: A number for the whole epoch; None takes the first caption.
        file_name: The name of the sample's file, with or without its ending.
        row: The sample's row. Each of the rows of a repeated sample draws for itself.
        num_captions: How many captions the sample has.
    """
    if draw is None or num_captions == 1:
        return 0
    return derived_seed(draw, os.path.splitext(file_name)[0], row.get("repeat", 0)) % num_captions


def one_caption(data: dict[str, T], number: int) -> dict[str, T]:
    """A sample's dictionary as if it had this caption only.

    Args:
        data: What a cache file holds.
        number: The caption's number, from 0.
    """
    prompts: Any = data.get(PROMPTS)
    if prompts is None:
        return data
    keys = {key: split_caption_key(key) for key in data if key != PROMPTS}
    numbered = {name for name, of in keys.values() if of}
    chosen = {}
    for key, (name, of) in keys.items():
        if of == number or (not of and name not in numbered):
            chosen[name] = data[key]
    if number:  # the row may have another text for the first
        chosen["prompt"] = prompts[number]
    return chosen
