"""The samples of a cache as columns: each sample's file name and bucket, and nothing else.

A training run needs no more than that to order and find its samples; everything else is in the cache file. Ten
million rows take half a gigabyte of columns instead of a hundred million Python objects. Decoding the JSON shards
takes about 2 µs a row, so from ``SAVE_FROM_ROWS`` rows the index is saved beside them (``saved_index``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from latentry.cache.format import (
    METADATA_NAME,
    CacheMetadata,
    IndexRow,
    file_name,
)
from latentry.errors import MetadataError
from latentry.types import Bucket, BucketKey


@dataclass(frozen=True)
class CacheIndex:
    """The samples of a cache with one file each. Row numbers follow the order in the metadata shards."""

    metadata: CacheMetadata
    bucket_keys: tuple[BucketKey, ...]
    """The buckets, in order of first appearance."""
    shard_lengths: tuple[int, ...]
    names: Any
    """The cache files' names, as an Arrow string array."""
    bucket_of_row: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    """For each row, its bucket's position in ``bucket_keys``."""

    def __len__(self) -> int:
        return len(self.bucket_of_row)

    def relative_file(self, row: int) -> str:
        """The row's file, relative to the cache: ``512x512/0a1b….meta``."""
        return f"{self.bucket(row).folder}/{self.names[row].as_py()}"

    def bucket(self, row: int) -> Bucket:
        return self.bucket_keys[int(self.bucket_of_row[row])].bucket

    def rows_by_bucket(self) -> list[npt.NDArray[np.int64]]:
        """The row numbers of each bucket, ascending."""
        order = np.argsort(self.bucket_of_row, kind="stable")
        counts = np.bincount(self.bucket_of_row, minlength=len(self.bucket_keys))
        return np.split(order, np.cumsum(counts)[:-1])

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the files and their order, wherever the cache is."""
        buckets = ", ".join(key.identity for key in self.bucket_keys)
        # The text of a tuple: one element has a trailing comma.
        text = f"({buckets},)" if len(self.bucket_keys) == 1 else f"({buckets})"
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.bucket_of_row).data)
        _, offsets, characters = self.names.buffers()
        ends = np.frombuffer(offsets, dtype=np.int64, count=len(self) + 1)
        digest.update(ends.data)
        digest.update(memoryview(characters)[: ends[-1]])  # without Arrow's padding
        return digest.hexdigest()


NameAspect = Callable[[float], str]
"""Gives an aspect ratio the name that is part of its bucket's key."""


def index_of_rows(
    rows: Sequence[IndexRow], metadata: CacheMetadata, cache_dir: Path, name_aspect: NameAspect
) -> CacheIndex:
    """The index of these rows only."""
    return index_of_shards([(rows, cache_dir / METADATA_NAME)], metadata, name_aspect)


def index_of_dicts(
    rows: Iterable[Mapping[str, Any]], metadata: CacheMetadata, cache_dir: Path, name_aspect: NameAspect
) -> CacheIndex:
    """The index of some of a cache's rows, given as dictionaries."""
    try:
        checked = msgspec.convert(list(rows), list[IndexRow])
    except msgspec.ValidationError as error:
        raise MetadataError(f"the rows given for {cache_dir}: {error}") from None
    return index_of_rows(checked, metadata, cache_dir, name_aspect)


def index_of_shards(
    shards: Iterable[tuple[Sequence[IndexRow], Path]], metadata: CacheMetadata, name_aspect: NameAspect
) -> CacheIndex:
    """The index of the rows of several metadata shards, each given with its path for error messages."""
    numbers: dict[tuple[Any, ...], int] = {}
    names, bucket_of_row, lengths = [], [], []
    for rows, path in shards:
        keys = [(r.bucket_resolution or r.crop_resolution, r.aspect_ratio, r.num_frames) for r in rows]
        known = len(numbers)
        bucket_of_row.append(np.array([numbers.setdefault(k, len(numbers)) for k in keys], dtype=np.int64))
        for key in list(numbers)[known:]:
            _check_key(key, where=f"{path}, row {keys.index(key)}")
        names.append(pa.array(_safe_names(rows, path), type=pa.large_string()))
        lengths.append(len(rows))

    # Rows of one bucket may describe it differently, for example with and without an aspect ratio.
    key_numbers: dict[BucketKey, int] = {}
    number_of_key = np.array(
        [key_numbers.setdefault(_bucket_key(key, name_aspect), len(key_numbers)) for key in numbers],
        dtype=np.uint32,
    )
    if len(key_numbers) <= 1 << 16:
        number_of_key = number_of_key.astype(np.uint16)  # numpy sorts these ten times faster
    return CacheIndex(
        metadata=metadata,
        bucket_keys=tuple(key_numbers),
        shard_lengths=tuple(lengths),
        names=pa.concat_arrays(names),
        bucket_of_row=number_of_key[np.concatenate(bucket_of_row)],
    )


def _check_key(key: tuple[Any, ...], where: str) -> None:
    resolution, _, num_frames = key
    if resolution is None:
        raise MetadataError(f"{where}: the row has no bucket_resolution")
    if min(resolution) < 1:
        raise MetadataError(f"{where}: bucket_resolution is {list(resolution)}; both sides must be positive")
    if num_frames is not None and num_frames < 1:
        raise MetadataError(f"{where}: num_frames is {num_frames}; it must be positive")


def _bucket_key(key: tuple[Any, ...], name_aspect: NameAspect) -> BucketKey:
    (width, height), aspect_ratio, num_frames = key
    aspect_name = name_aspect(width / height if aspect_ratio is None else aspect_ratio)
    return BucketKey(width, height, aspect_name, num_frames)


def _safe_names(rows: Sequence[IndexRow], shard: Path) -> list[str]:
    names = [file_name(row.cache_file) for row in rows]
    for bad in {"", ".", ".."}.intersection(names):
        row = names.index(bad)
        raise MetadataError(f"{shard}, row {row}: cache_file {rows[row].cache_file!r} is not a file name")
    return names
