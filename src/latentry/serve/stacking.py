"""Tensors of a batch: stacked as they are, or padded where the samples' lengths differ.

Text of different lengths costs a copy and a mask. Samples that are alike were read into one tensor, and nothing is done
to them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from latentry.cache.read.columns import Columns
from latentry.cache.read.fields import Padding, TensorField
from latentry.errors import CacheFileError


def stack_fields(columns: Columns, fields: Sequence[TensorField]) -> dict[str, torch.Tensor]:
    """All of these fields that samples have, by name, and the masks of those that had to be padded.

    Args:
        columns: The samples.
        fields: Which fields. A required one that no sample has is an error.
    """
    output: dict[str, torch.Tensor] = {}
    for field in fields:
        if field.name in output or (not field.required and field.name not in columns.tensors):
            continue
        lengths = _different_lengths(columns, field)
        if field.padding is None or lengths is None:
            output[field.name] = stacked(columns, field.name)
        else:
            output |= _padded(columns, field, field.padding, lengths)
    return output


def stacked(columns: Columns, name: str) -> torch.Tensor:
    """The field's tensors, which must all have the same shape."""
    column = columns.tensors.get(name)
    if isinstance(column, torch.Tensor):
        return column
    tensors = present_tensors(columns, name)
    for i, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            raise _different(columns, name, i, list(tensor.shape), tensors[0])
    return torch.stack(tensors)


def present_tensors(columns: Columns, name: str) -> list[torch.Tensor]:
    """The field's tensors. A ``CacheFileError`` if a sample has none."""
    column = columns.tensors.get(name)
    present = [tensor for tensor in column or () if tensor is not None]
    if column is None or not present:
        raise CacheFileError(f"{columns.describe(0)} has no {name}")
    for i, tensor in enumerate(column):
        if tensor is None:
            raise _different(columns, name, i, "missing", present[0])
    return present


def _different(columns: Columns, name: str, i: int, found: object, like: torch.Tensor) -> CacheFileError:
    first = next(j for j, tensor in enumerate(columns.tensors[name]) if tensor is not None)
    return CacheFileError(
        f"{columns.describe(i)}: {name} is {found}, but {list(like.shape)} in {columns.describe(first)}; "
        "all samples of a batch must have the same shape"
    )


def _different_lengths(columns: Columns, field: TensorField) -> list[int] | None:
    """The lengths of the samples along the dimension that may be padded; None unless they differ only there."""
    if field.padding is None or isinstance(columns.tensors.get(field.name), torch.Tensor):
        return None
    dim = field.padding.dim
    tensors = present_tensors(columns, field.name)
    lengths = [tensor.shape[dim] for tensor in tensors]
    others = {(*tensor.shape[:dim], *tensor.shape[dim:][1:]) for tensor in tensors}
    return lengths if len(others) == 1 and len(set(lengths)) > 1 else None


def _padded(
    columns: Columns, field: TensorField, padding: Padding, lengths: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The field and its mask, which the samples may have."""
    length = -(-max(lengths) // padding.multiple_of) * padding.multiple_of
    tensors = present_tensors(columns, field.name)
    if padding.mask in columns.tensors:
        masks = present_tensors(columns, padding.mask)
        for i, mask in enumerate(masks):
            if mask.shape[-1] != lengths[i]:
                raise CacheFileError(
                    f"{columns.describe(i)}: {padding.mask} has {mask.shape[-1]} positions, but {field.name} has "
                    f"{lengths[i]}"
                )
    else:
        # A video's tensors have a leading dimension of 1, and so does its mask.
        leading = (1,) * (tensors[0].ndim - field.num_dims)
        masks = [torch.ones((*leading, n), dtype=torch.int64, device=tensors[0].device) for n in lengths]
    return {
        field.name: _with_zeros(tensors, padding.dim, length),
        padding.mask: _with_zeros(masks, -1, length),
    }


def _with_zeros(tensors: Sequence[torch.Tensor], dim: int, length: int) -> torch.Tensor:
    """The tensors stacked, with zeros at the end of one dimension."""
    shape = list(tensors[0].shape)
    shape[dim] = length
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    output = torch.zeros((len(tensors), *shape), dtype=dtype, device=tensors[0].device)
    for i, tensor in enumerate(tensors):
        output[i].narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return output
