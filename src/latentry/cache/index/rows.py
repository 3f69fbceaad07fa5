"""The rows of a cache as a sequence of dictionaries.

Whole rows of ten million samples would take gigabytes, so each is read when it is asked for.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias, overload

import msgspec
import numpy as np
import numpy.typing as npt

from latentry.cache.index.file_index import CacheIndex
from latentry.cache.index.packed_index import PackedIndex
from latentry.errors import CacheNotFoundError, MetadataError
from latentry.storage import OpenFile, OpenFiles

_ROW = msgspec.json.Decoder(dict[str, Any])


Rows: TypeAlias = "Sequence[dict[str, Any]]"
"""One dictionary per sample: read when they are asked for, or given by the user."""


def stored_row(rows: Rows, position: int) -> dict[str, Any]:
    """The row at this position; where it may differ, as it is written."""
    return rows.stored(position) if isinstance(rows, LazyRows) else rows[position]


class LazyRows(Sequence[dict[str, Any]]):
    """Rows that are read when they are asked for. ``cache_file`` is where the file is now."""

    @abstractmethod
    def stored(self, position: int) -> dict[str, Any]:
        """The row at this position, which exists, as it is written."""

    @abstractmethod
    def _row(self, position: int) -> dict[str, Any]:
        """The row at this position, which exists, with the fields that say where the sample is now."""

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(*index.indices(len(self)))]
        return self._row(range(len(self))[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._row(i) for i in range(len(self)))


class MetadataRows(LazyRows):
    """The rows of a cache with one file per sample, read from its metadata shards.

    Of each metadata shard that is used, only the positions of its rows are kept, 4 bytes a row. So every row costs one
    small read, in any order. Several threads may read at once.
    """

    def __init__(self, cache_dir: Path, index: CacheIndex) -> None:
        self._cache_dir = cache_dir
        self._index = index
        self._ends = list(accumulate(index.shard_lengths))
        self._files = OpenFiles(cache_dir)
        self._starts: dict[int, npt.NDArray[Any]] = {}
        """For each metadata shard that was used, the position of each row's first byte, and the size of the file."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def stored(self, position: int) -> dict[str, Any]:
        number = bisect_right(self._ends, position)
        shard = self._index.metadata.shards[number]
        try:
            file = self._files.get(shard)
            starts = self._starts.get(number)
            if starts is None:
                starts = self._starts[number] = _row_starts(file)
            i = position - (self._ends[number - 1] if number else 0)
            start, end = starts[i : i + 2].tolist()
            # After a row come a comma or the end of the list, and white space.
            return _ROW.decode(os.pread(file.descriptor, end - start, start).rstrip(b" \t\r\n,]"))
        except FileNotFoundError:
            raise CacheNotFoundError(f"{self._cache_dir / shard} is missing; it was there before") from None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise MetadataError(
                f"{self._cache_dir / shard} was changed while it was in use ({error}); open the cache again"
            ) from None

    def _row(self, position: int) -> dict[str, Any]:
        file = self._index.relative_file(position)
        return {**self.stored(position), "cache_file": str(self._cache_dir / file)}


class PackedRows(LazyRows):
    """The rows of a packed cache, read from its index."""

    def __init__(self, cache_dir: Path, index: PackedIndex) -> None:
        self._cache_dir = cache_dir
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    def stored(self, position: int) -> dict[str, Any]:
        return self._index.row(position)

    def _row(self, position: int) -> dict[str, Any]:
        return {
            **self.stored(position),
            "cache_file": str(self._cache_dir / self._index.relative_file(position)),
            "packed_row": position,
        }


def _row_starts(file: OpenFile) -> npt.NDArray[Any]:
    """The position of the first byte of each row of a metadata shard, and the size of the file."""
    content = file.read()
    starts = []
    end = 0
    for row in msgspec.json.decode(content, type=list[msgspec.Raw]):
        starts.append(content.index(b"{", end))  # between rows there are only commas and white space
        end = starts[-1] + len(memoryview(row))
    return np.array([*starts, len(content)], np.uint32 if len(content) < 1 << 32 else np.uint64)


def open_rows(cache_dir: Path, index: CacheIndex | PackedIndex) -> LazyRows:
    """The rows of the cache that an index lists."""
    if isinstance(index, PackedIndex):
        return PackedRows(cache_dir, index)
    return MetadataRows(cache_dir, index)
