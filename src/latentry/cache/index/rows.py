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
from typing import Any, overload

import msgspec
import numpy as np
import numpy.typing as npt

from latentry.cache.index.file_index import CacheIndex
from latentry.cache.index.packed_index import PackedIndex
from latentry.errors import CacheNotFoundError, MetadataError
from latentry.storage import OpenFile, OpenFiles

_ROW = msgspec.json.Decoder(dict[str, Any])


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

    Of each metadata shard that is used, only the positions of its rows are kept, 16 bytes a row. So every row costs one
    small read, in any order. Several threads may read at once.
    """

    def __init__(self, cache_dir: Path, index: CacheIndex) -> None:
        self._cache_dir = cache_dir
        self._index = index
        self._ends = list(accumulate(index.shard_lengths))
        self._files = OpenFiles(cache_dir)
        self._positions: dict[int, npt.NDArray[np.int64]] = {}
        """For each metadata shard that was used, the start and the end of each row, in bytes."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def stored(self, position: int) -> dict[str, Any]:
        number = bisect_right(self._ends, position)
        shard = self._index.metadata.shards[number]
        try:
            file = self._files.get(shard)
            positions = self._positions.get(number)
            if positions is None:
                positions = self._positions[number] = _row_positions(file)
            start, end = positions[position - (self._ends[number - 1] if number else 0)].tolist()
            return _ROW.decode(os.pread(file.descriptor, end - start, start))
        except FileNotFoundError:
            raise CacheNotFoundError(f"{self._cache_dir / shard} is missing; it was there before") from None
        except (OSError, msgspec.MsgspecError, ValueError, IndexError) as error:
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


def _row_positions(file: OpenFile) -> npt.NDArray[np.int64]:
    """The first byte of each row of a metadata shard, and the byte after its last one, as [rows,2]."""
    content = file.read()
    positions = []
    end = 0
    for row in msgspec.json.decode(content, type=list[msgspec.Raw]):
        start = content.index(b"{", end)  # between rows there are only commas and white space
        end = start + len(memoryview(row))
        positions.append((start, end))
    return np.array(positions, np.int64)


def open_rows(cache_dir: Path, index: CacheIndex | PackedIndex) -> LazyRows:
    """The rows of the cache that an index lists."""
    if isinstance(index, PackedIndex):
        return PackedRows(cache_dir, index)
    return MetadataRows(cache_dir, index)
