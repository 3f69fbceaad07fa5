"""The rows of a cache as a sequence of dictionaries.

Training never does. Whole rows of ten million samples would take gigabytes, so each is read when it is asked for.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

from latentry.cache.format import read_row_dicts, relative_path
from latentry.cache.index.file_index import CacheIndex
from latentry.cache.index.packed_index import PackedIndex


class LazyRows(Sequence[dict[str, Any]]):
    """Rows that are read when they are asked for. ``cache_file`` is where the file is now."""

    @abstractmethod
    def _row(self, position: int) -> dict[str, Any]:
        """The row at this position, which exists."""

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

    The last few metadata shards stay in memory: reading in order is fast, random access is not.
    """

    _SHARDS_KEPT = 4

    def __init__(self, cache_dir: Path, shards: Sequence[str], shard_lengths: Sequence[int]) -> None:
        self._cache_dir = cache_dir
        self._shards = shards
        self._ends = list(accumulate(shard_lengths))
        self._kept: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _row(self, position: int) -> dict[str, Any]:
        shard = bisect_right(self._ends, position)
        start = self._ends[shard - 1] if shard else 0
        row = self._rows(shard)[position - start]
        bucket = row.get("bucket_resolution") or row["crop_resolution"]
        return {**row, "cache_file": str(self._cache_dir / relative_path(bucket, row["cache_file"]))}

    def _rows(self, shard: int) -> list[dict[str, Any]]:
        if shard not in self._kept:
            self._kept[shard] = read_row_dicts(self._cache_dir, self._shards[shard])
            if len(self._kept) > self._SHARDS_KEPT:
                self._kept.popitem(last=False)
        return self._kept[shard]


class PackedRows(LazyRows):
    """The rows of a packed cache, read from its index."""

    def __init__(self, cache_dir: Path, index: PackedIndex) -> None:
        self._cache_dir = cache_dir
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    def _row(self, position: int) -> dict[str, Any]:
        return {
            **self._index.row(position),
            "cache_file": str(self._cache_dir / self._index.relative_file(position)),
            "packed_row": position,
        }


def open_rows(cache_dir: Path, index: CacheIndex | PackedIndex) -> LazyRows:
    """The rows of the cache that an index lists."""
    if isinstance(index, PackedIndex):
        return PackedRows(cache_dir, index)
    return MetadataRows(cache_dir, index.metadata.shards, index.shard_lengths)
