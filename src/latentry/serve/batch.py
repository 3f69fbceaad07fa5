"""What a dataset hands over: samples that were read at once, checked against their rows, column by column.

Making, checking and stacking tensors one sample at a time costs a third of reading them, so as long as all samples of
a batch are alike a column is one tensor from the disk to the trainer. Items, one sample each, are cut out of the
columns for whoever asks for them.
"""

from __future__ import annotations

import os
from collections import UserList
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from latentry.cache.read.batch_buffers import Loaded, plain_tensor
from latentry.cache.read.samples import Samples
from latentry.errors import CacheFileError
from latentry.types import BucketShape

Column = torch.Tensor | list[torch.Tensor | None]
"""A tensor of each sample: in one piece, or where they are not alike in a list, None for those that have none."""


def each(column: Column, change: Callable[[torch.Tensor], torch.Tensor]) -> Column:
    """The column with every sample's tensor changed, by what does the same to a batch of them."""
    if isinstance(column, torch.Tensor):
        return change(column)
    return [None if tensor is None else change(tensor[None])[0] for tensor in column]


class BatchColumns(NamedTuple):
    """A batch by what its samples have."""

    tensors: Mapping[str, Column]
    values: Mapping[str, list[Any]]
    where: Callable[[int], str]
    """A sample's place, for people."""


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
        return self._samples.describe(self._rows[i])

    def file(self, i: int) -> str:
        return os.path.join(self._cache_dir, self._samples.file(self._rows[i]))


class Item(dict[str, Any]):
    """A sample of a batch, which can say where it comes from. In another process it is a dictionary."""

    def __init__(
        self, content: Mapping[str, Any] | Iterable[Any] = (), places: Places | None = None, i: int = 0
    ) -> None:
        super().__init__(content)
        self._places = places
        self._i = i

    @property
    def where(self) -> str:
        """Its place, for people."""
        return "a sample" if self._places is None else self._places.where(self._i)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return (dict, (dict(self),))


class Items(UserList[Any]):
    """The items of a batch, as a list that is filled when somebody looks into it.

    Until then ``columns`` has everything; afterwards it is None, for whoever has an item may have changed it.
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._items = list(items)
        self._unfilled: tuple[BatchColumns, Places] | None = None

    @classmethod
    def of(cls, tensors: dict[str, Column], values: dict[str, list[Any]], places: Places) -> Items:
        items = cls()
        items._unfilled = (BatchColumns(tensors, values, places.where), places)
        return items

    @property
    def columns(self) -> BatchColumns | None:
        return self._unfilled[0] if self._unfilled else None

    @property
    def data(self) -> list[Any]:
        """What a ``UserList`` keeps its items in."""
        if self._unfilled:
            columns, places = self._unfilled
            self._items = [_item(i, columns, places) for i in range(len(places))]
            self._unfilled = None
        return self._items

    @data.setter
    def data(self, items: list[Any]) -> None:
        self._items, self._unfilled = items, None

    def __len__(self) -> int:
        return len(self._unfilled[1] if self._unfilled else self._items)

    def __copy__(self) -> Items:
        return Items(self)

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[Any]]]:
        return (list, (list(self),))


def _item(i: int, columns: BatchColumns, places: Places) -> Item:
    item = Item({key: column[i] for key, column in columns.values.items()}, places, i)
    for key, column in columns.tensors.items():
        tensor = column[i]
        if tensor is not None:
            item[key] = tensor
    item["cache_file"] = places.file(i)
    return item


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
            return (
                together[:, 0] if self._has_one_too_many(0, key, together.shape[1:], num_dims) else together
            )
        column: list[torch.Tensor | None] = []
        for i, value in enumerate(self.values(key) if required else self.optional(key)):
            if value is not None:
                value = self._plain_tensor(i, key, value)
                value = value[0] if self._has_one_too_many(i, key, value.shape, num_dims) else value
            column.append(value)
        return column

    def _plain_tensor(self, i: int, key: str, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise CacheFileError(f"{self.places.where(i)}: {key} is a {type(value).__name__}, not a tensor")
        return plain_tensor(value, key, lambda: self.places.where(i))

    def _has_one_too_many(self, i: int, key: str, shape: torch.Size, num_dims: int) -> bool:
        """Whether there is a leading dimension of 1 before so many; an error where it is something else."""
        if len(shape) == num_dims + 1 and shape[0] == 1:
            return True
        if len(shape) != num_dims:
            raise CacheFileError(
                f"{self.places.where(i)}: {key} has shape {list(shape)}; expected {num_dims} dimensions"
            )
        return False

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
