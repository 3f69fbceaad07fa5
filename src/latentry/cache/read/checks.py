"""Whether what was read fits its row.

Both datasets and ``latentry verify`` use these checks. They take a batch as it was read and return the fields that are
served. A leading dimension of 1, which files may have or not, is removed; ``TextToVideoDataset`` adds it again. Optional
fields that no sample has are left out. Anything wrong raises ``CacheFileError`` with the sample's file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from latentry.cache.read.columns import Column, Columns
from latentry.cache.read.fields import FileFields, TensorField
from latentry.cache.read.tiled_latents import TiledLatents
from latentry.errors import CacheFileError
from latentry.types import Bucket

T = TypeVar("T")


def image_columns(columns: Columns, buckets: Sequence[Bucket], fields: FileFields) -> Columns:
    """A batch of images, checked, without the leading dimension of 1.

    Args:
        columns: What was read with these fields.
        buckets: The bucket in each sample's row.
        fields: ``IMAGE_FIELDS`` or ``IMAGE_TOKEN_FIELDS``.
    """
    tensors = {
        **_unknown(columns.tensors, fields),
        **_tensors(columns, buckets, fields),
        "crop_resolution": _resolutions(buckets),
        "original_resolution": _pairs(columns, "original_resolution"),
        "crop_offset": _pairs(columns, "crop_offset"),
    }
    values = {
        **_unknown(columns.values, fields),
        "prompt": _values(columns, "prompt", required=True),
        "image_path": _values(columns, "image_path", required=True),
        "bucket_id": _values(columns, "bucket_id"),
        "aspect_ratio": _aspect_ratios(columns, buckets),
        "cache_file": columns.values["cache_file"],
    }
    return Columns(columns.num_samples, tensors, values, columns.describe)


def video_columns(
    columns: Columns, buckets: Sequence[Bucket], fields: FileFields, tiles: TiledLatents | None = None
) -> Columns:
    """A batch of videos, checked, without the leading dimension of 1.

    Args:
        columns: What was read with these fields.
        buckets: The bucket in each sample's row.
        fields: ``VIDEO_FIELDS``.
        tiles: Accepts latents that are larger than their bucket. By default they are an error.
    """
    tensors = {
        **_unknown(columns.tensors, fields),
        **_tensors(columns, buckets, fields, tiles),
        "bucket_resolution": _resolutions(buckets),
    }
    values = {
        **_unknown(columns.values, fields),
        "aspect_ratio": _aspect_ratios(columns, buckets),
        "cache_file": columns.values["cache_file"],
    }
    return Columns(columns.num_samples, tensors, values, columns.describe)


def _unknown(columns: Mapping[str, T], fields: FileFields) -> dict[str, T]:
    return {name: column for name, column in columns.items() if name not in fields.names}


def map_samples(column: Column, change: Callable[[torch.Tensor], torch.Tensor]) -> Column:
    """The column with a function applied that does the same to a stack of tensors as to each one."""
    if isinstance(column, torch.Tensor):
        return change(column)
    return [None if tensor is None else change(tensor[None])[0] for tensor in column]


def _tensors(
    columns: Columns, buckets: Sequence[Bucket], fields: FileFields, tiles: TiledLatents | None = None
) -> dict[str, Column]:
    tensors = {fields.latents.name: _latents(columns, fields.latents, buckets, tiles)}
    for field in fields.text:
        column = _tensor_column(columns, field)
        if column is not None:
            tensors[field.name] = column
    return tensors


def _tensor_column(columns: Columns, field: TensorField) -> Column | None:
    """The field without the leading dimension of 1; None if it is optional and no sample has it."""
    column = columns.tensors.get(field.name)
    _check_types(columns, field, column)
    if column is None:
        return None
    if isinstance(column, torch.Tensor):
        return column[:, 0] if _has_leading_one(columns, 0, field, column.shape[1:]) else column
    return [
        tensor[0] if tensor is not None and _has_leading_one(columns, i, field, tensor.shape) else tensor
        for i, tensor in enumerate(column)
    ]


def _check_types(columns: Columns, field: TensorField, column: Column | None) -> None:
    """An error for a plain value in place of a tensor, and for a required tensor that is missing."""
    for i, value in enumerate(columns.values.get(field.name, ())):
        if value is not None:
            raise CacheFileError(
                f"{columns.describe(i)}: {field.name} is a {type(value).__name__}, not a tensor"
            )
    if field.required and not isinstance(column, torch.Tensor):
        for i in range(columns.num_samples):
            if column is None or column[i] is None:
                raise _missing(columns, i, field.name)


def _missing(columns: Columns, i: int, name: str) -> CacheFileError:
    found = [key for key, column in columns.tensors.items() if column[i] is not None]
    found += [key for key, values in columns.values.items() if values[i] is not None and key != "cache_file"]
    return CacheFileError(f"{columns.describe(i)} has no {name}; it has {', '.join(found) or 'nothing'}")


def _has_leading_one(columns: Columns, i: int, field: TensorField, shape: torch.Size) -> bool:
    """Whether the tensor has one dimension too many, of size 1; an error if its shape is wrong otherwise."""
    if len(shape) == field.num_dims + 1 and shape[0] == 1:
        return True
    if len(shape) != field.num_dims:
        raise CacheFileError(
            f"{columns.describe(i)}: {field.name} has shape {list(shape)}; expected {field.num_dims} dimensions"
        )
    return False


def _latents(
    columns: Columns, field: TensorField, buckets: Sequence[Bucket], tiles: TiledLatents | None
) -> Column:
    """The latents, each checked to be its bucket's picture shrunk by one whole factor."""
    column = _tensor_column(columns, field)
    assert column is not None, "latents are required"
    if isinstance(column, torch.Tensor):
        sizes = [column.shape[1:]] * len(buckets)
    else:
        sizes = [tensor.shape for tensor in column if tensor is not None]
    known = None
    for i, pair in enumerate(zip(sizes, buckets, strict=True)):
        if pair != known:
            _check_latent(columns, i, field.name, *pair, tiles)
            known = pair
    return column


def _check_latent(
    columns: Columns, i: int, name: str, shape: torch.Size, bucket: Bucket, tiles: TiledLatents | None
) -> None:
    height, width = shape[-2:]
    factor = bucket.width // max(1, width)
    is_larger = tiles is not None and tiles.accepts(width, height, bucket)
    if not is_larger and (width * factor, height * factor) != (bucket.width, bucket.height):
        raise CacheFileError(
            f"{columns.describe(i)}: {name} has shape {list(shape)}, which is not a scaled-down "
            f"{bucket.width}x{bucket.height}, the bucket in its row"
        )
    if bucket.num_frames is not None and len(shape) == 4 and shape[1] > bucket.num_frames:
        raise CacheFileError(
            f"{columns.describe(i)}: {name} has {shape[1]} frames, but its row says num_frames {bucket.num_frames}"
        )


def _values(columns: Columns, name: str, *, required: bool = False) -> Sequence[Any]:
    """A plain field, one value per sample; where a file stores a tensor, the tensor."""
    values = columns.values.get(name)
    tensors = columns.tensors.get(name)
    if values is None:
        values = [None] * columns.num_samples if tensors is None else list(tensors)
    elif tensors is not None:
        values = [tensor if value is None else value for value, tensor in zip(values, tensors, strict=True)]
    if required:
        for i, value in enumerate(values):
            if value is None:
                raise _missing(columns, i, name)
    return values


def _aspect_ratios(columns: Columns, buckets: Sequence[Bucket]) -> list[Any]:
    """The stored aspect ratios; the bucket's where none is stored."""
    return [
        bucket.width / bucket.height if value is None else value
        for value, bucket in zip(_values(columns, "aspect_ratio"), buckets, strict=True)
    ]


def _pairs(columns: Columns, name: str) -> torch.Tensor:
    """Two whole numbers per sample, such as a resolution."""
    return torch.tensor(
        [_pair(columns, i, name, value) for i, value in enumerate(_values(columns, name, required=True))]
    )


def _pair(columns: Columns, i: int, name: str, value: Any) -> tuple[int, int]:
    try:
        first, second = (int(number) for number in value)
    except (TypeError, ValueError, RuntimeError):
        found = " ".join(repr(value).split())
        raise CacheFileError(f"{columns.describe(i)}: {name} is {found}; it must be two numbers") from None
    return first, second


def _resolutions(buckets: Sequence[Bucket]) -> torch.Tensor:
    return torch.tensor([bucket.resolution for bucket in buckets])
