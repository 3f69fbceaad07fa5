"""What a dataset hands over: samples that were read at once, checked against their rows, column by column.

Making, checking and stacking tensors one sample at a time costs as much as reading them, so as long as all samples of
a batch are alike a column is one tensor from the disk to the trainer. Items, one sample each, are cut out of the
columns for whoever asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from latentry.cache.rooms import Loaded
from latentry.cache.samples import Samples
from latentry.errors import CacheFileError
from latentry.records import BucketShape

Item = dict[str, Any]
Column = torch.Tensor | list[torch.Tensor | None]
"""A tensor of each sample: in one piece, or where they are not alike in a list, None for those that have none."""


def each(column: Column, change: Callable[[torch.Tensor], torch.Tensor]) -> Column:
    """The column with every sample's tensor changed, by what does the same to a batch of them."""
    if isinstance(column, torch.Tensor):
        return change(column)
    return [None if tensor is None else change(tensor[None])[0] for tensor in column]


class Places:
    """Where some samples are."""

    def __init__(self, cache_dir: Path, samples: Samples, rows: Sequence[int]) -> None:
        self._cache_dir = cache_dir
        self._samples = samples
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, i: int) -> str:
        """A sample's place, for people."""
        return self._samples.where(self._rows[i])

    def file(self, i: int) -> str:
        return os.path.join(self._cache_dir, self._samples.file(self._rows[i]))


class Items(Sequence[Item]):
    """The items of a batch, which a collate function may take as they are, or by column.

    There are columns until an item is handed out; whoever has it may change it.
    """

    def __init__(self, tensors: dict[str, Column], values: dict[str, list[Any]], places: Places) -> None:
        self._columns: tuple[dict[str, Column], dict[str, list[Any]]] | None = (tensors, values)
        self._items: list[Item] = []
        self._places = places

    @property
    def columns(self) -> tuple[dict[str, Column], dict[str, list[Any]]] | None:
        """Tensors, and everything else."""
        return self._columns

    def where(self, i: int) -> str:
        """A sample's place, for people."""
        return self._places.where(i)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if self._columns is not None:
            self._items = [self._item(i, *self._columns) for i in range(len(self))]
            self._columns = None
        return self._items[index]

    def _item(self, i: int, tensors: Mapping[str, Column], values: Mapping[str, list[Any]]) -> Item:
        item = {key: column[i] for key, column in values.items()}
        item |= {key: column[i] for key, column in tensors.items() if column[i] is not None}
        return item | {"cache_file": self._places.file(i)}

    def __reduce__(self) -> tuple[type[list[Item]], tuple[list[Item]]]:
        return (list, (list(self),))


class CachedSamples:
    """What a cache holds of some samples, together with what it must agree with."""

    def __init__(self, places: Places, shapes: Sequence[BucketShape], loaded: Loaded) -> None:
        self._data = loaded.values
        self._together = loaded.together
        self.places = places
        self.shapes = shapes

    def optional(self, key: str) -> list[Any]:
        return [data.get(key) for data in self._plain(key)]

    def aspect_ratios(self) -> list[Any]:
        """Those that are stored, and where none is the bucket's."""
        return [
            data.get("aspect_ratio", shape.width / shape.height)
            for data, shape in zip(self._plain("aspect_ratio"), self.shapes, strict=True)
        ]

    def values(self, key: str) -> list[Any]:
        """What each of the samples must have."""
        found = self.optional(key)
        for i, value in enumerate(found):
            if value is None:
                held = ", ".join(map(str, [*self._data[i], *self._together]))
                raise CacheFileError(f"{self.places.where(i)} has no {key}; it holds {held}")
        return found

    def _plain(self, key: str) -> Sequence[Mapping[str, Any]]:
        """Dictionaries to look for it in: a field that is usually plain may be a tensor, like all the others'."""
        together = self._together.get(key)
        return self._data if together is None else [{key: value} for value in together]

    def pairs(self, key: str) -> torch.Tensor:
        """Two whole numbers each, such as resolutions."""
        return torch.tensor([self._pair(i, key, value) for i, value in enumerate(self.values(key))])

    def _pair(self, i: int, key: str, value: Any) -> tuple[int, int]:
        try:
            first, second = (int(number) for number in value)
        except (TypeError, ValueError, RuntimeError):
            found = " ".join(repr(value).split())
            raise CacheFileError(
                f"{self.places.where(i)}: {key} is {found}; it must be two numbers"
            ) from None
        return first, second

    def has(self, key: str) -> bool:
        """Whether any of the samples has it."""
        return key in self._together or any(data.get(key) is not None for data in self._data)

    def tensors(self, key: str, num_dims: int, *, required: bool = True) -> Column:
        """The tensors under this key; a leading dimension of 1 too many is taken off."""
        together = self._together.get(key)
        if together is not None:
            return self._without_ones(0, key, together, num_dims)
        return [
            None
            if value is None
            else self._without_ones(i, key, self._checked(i, key, value)[None], num_dims)[0]
            for i, value in enumerate(self.values(key) if required else self.optional(key))
        ]

    def _checked(self, i: int, key: str, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise CacheFileError(f"{self.places.where(i)}: {key} is a {type(value).__name__}, not a tensor")
        return value

    def _without_ones(self, i: int, key: str, batch: torch.Tensor, num_dims: int) -> torch.Tensor:
        shape = batch.shape[1:]
        if len(shape) == num_dims + 1 and shape[0] == 1:
            return batch[:, 0]
        if len(shape) != num_dims:
            raise CacheFileError(
                f"{self.places.where(i)}: {key} has shape {list(shape)}; expected {num_dims} dimensions"
            )
        return batch

    def latents(self, key: str, num_dims: int) -> Column:
        """Latents, checked to be their bucket's picture shrunk by one whole factor."""
        column = self.tensors(key, num_dims)
        if isinstance(column, torch.Tensor):
            sizes = [column.shape[1:]] * len(self.shapes)
        else:
            sizes = [tensor.shape for tensor in column if tensor is not None]
        known = None
        for i, pair in enumerate(zip(sizes, self.shapes, strict=True)):
            if pair != known:
                self._check_latent(i, key, *pair)
                known = pair
        return column

    def _check_latent(self, i: int, key: str, shape: torch.Size, bucket: BucketShape) -> None:
        height, width = shape[-2:]
        factor = bucket.width // max(1, width)
        if (width * factor, height * factor) != (bucket.width, bucket.height):
            raise CacheFileError(
                f"{self.places.where(i)}: {key} has shape {list(shape)}, which is not a scaled-down "
                f"{bucket.width}x{bucket.height}, the bucket in its row"
            )
        if bucket.num_frames is not None and len(shape) == 4 and shape[1] > bucket.num_frames:
            raise CacheFileError(
                f"{self.places.where(i)}: {key} has {shape[1]} frames, but its row says num_frames {bucket.num_frames}"
            )
