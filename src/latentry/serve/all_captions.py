"""All captions of each sample: the text tensors get a caption dimension.

Samples of one batch may have different numbers of captions. A sample has as many as it has. In a batch, captions that a
sample lacks are zeros, and ``num_captions`` says how many are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from latentry.cache.caption_keys import PROMPTS, caption_key, num_captions
from latentry.cache.read.columns import Column, Columns
from latentry.cache.read.fields import FileFields, TensorField
from latentry.errors import CacheFileError

NUM_CAPTIONS = "num_captions"


def fields_of_all_captions(fields: FileFields, max_captions: int) -> FileFields:
    """The fields that have to be read for samples with up to this many captions."""
    further = range(1, max_captions)
    return replace(
        fields,
        text=(
            *fields.text,
            *(
                replace(field, name=caption_key(field.name, number), required=False)
                for number in further
                for field in fields.of_captions
            ),
        ),
        values=tuple(dict.fromkeys((*fields.values, "prompt", PROMPTS))),
        unserved_tensors=(
            *fields.unserved_tensors,
            *(caption_key(name, number) for number in further for name in fields.unserved_tensors),
        ),
        all_captions=True,
    )


def merge_captions(columns: Columns, read: Columns, fields: FileFields, max_captions: int) -> Columns:
    """The batch with one tensor for all captions of a sample, [K,...], and the number of its captions.

    Args:
        columns: The checked batch, with a field for each caption.
        read: The same batch as it was read.
        fields: The fields of one caption.
        max_captions: The largest number of captions in the cache.
    """
    counts = [
        num_captions({PROMPTS: prompts}) for prompts in read.values.get(PROMPTS, [None] * columns.num_samples)
    ]
    merged: dict[str, Column] = {}
    for field in fields.of_captions:
        if field.name in columns.tensors:
            merged[field.name] = _merged(columns, field.name, counts)
    numbered = {caption_key(name, number) for name in merged for number in range(1, max_captions)}
    tensors = {name: column for name, column in columns.tensors.items() if name not in numbered}
    values = {name: column for name, column in columns.values.items() if name != PROMPTS}
    if "prompt" in fields.values:
        values["prompt"] = [list(_prompts(read, i)) for i in range(columns.num_samples)]
    tensors |= {**merged, NUM_CAPTIONS: torch.tensor(counts)}
    return Columns(columns.num_samples, tensors, values, columns.describe)


def _prompts(read: Columns, i: int) -> Sequence[Any]:
    prompts = read.values.get(PROMPTS, [None] * read.num_samples)[i]
    return prompts or [read.values["prompt"][i]]


def _merged(columns: Columns, name: str, counts: Sequence[int]) -> list[torch.Tensor | None]:
    """One field's tensors [K,...], or None for a sample without them."""
    found: list[torch.Tensor | None] = []
    for i, count in enumerate(counts):
        if columns.tensors[name][i] is None:
            found.append(None)
            continue
        tensors = []
        for number in range(count):
            column = columns.tensors.get(caption_key(name, number))
            tensor = None if column is None else column[i]
            if tensor is None:
                raise CacheFileError(
                    f"{columns.describe(i)} has {count} captions, but no {caption_key(name, number)}"
                )
            tensors.append(tensor)
        found.append(torch.stack(padded(tensors)))
    return found


def padded(tensors: Sequence[torch.Tensor], dim: int | None = None) -> list[torch.Tensor]:
    """The tensors with zeros at the end of one dimension, or of all, so that they have the same size there."""
    sizes = [max(sides) for sides in zip(*(tensor.shape for tensor in tensors), strict=True)]
    result = []
    for tensor in tensors:
        shape = [size if dim in (None, d) else tensor.shape[d] for d, size in enumerate(sizes)]
        if list(tensor.shape) != shape:
            larger = tensor.new_zeros(shape)
            larger[tuple(slice(side) for side in tensor.shape)] = tensor
            tensor = larger
        result.append(tensor)
    return result


def pad_captions(columns: Columns, fields: Sequence[TensorField]) -> Columns:
    """A batch whose samples have the same number of captions, if it has all captions of its samples.

    Args:
        columns: Any batch.
        fields: The fields of captions.
    """
    if NUM_CAPTIONS not in columns.tensors:
        return columns
    tensors = dict(columns.tensors)
    for field in fields:
        column = tensors.get(field.name)
        present = [] if column is None else [tensor for tensor in column if tensor is not None]
        if column is not None and len(present) == len(column):
            # Items of videos have a leading dimension of 1.
            tensors[field.name] = list(padded(present, present[0].ndim - field.num_dims - 1))
    return Columns(columns.num_samples, tensors, columns.values, columns.describe)
