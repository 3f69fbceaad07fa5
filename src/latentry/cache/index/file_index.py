"""The samples of a cache as columns: each sample's file and bucket, and nothing else.

A training run needs no more than that to order and find its samples. Ten million rows take half a gigabyte of columns
instead of a hundred million Python objects. Decoding the JSON shards
takes about 2 µs a row, so from ``SAVE_FROM_ROWS`` rows the index is saved beside them (``saved_index``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from latentry.cache.format import (
    METADATA_NAME,
    CacheMetadata,
    IndexRow,
)
from latentry.cache.locator import FileLocator
from latentry.errors import MetadataError
from latentry.types import Bucket, BucketKey

_NOTHING, _SLASH = (pa.scalar(text, pa.large_string()) for text in ("", "/"))
Numbers: TypeAlias = "npt.NDArray[np.uint16] | npt.NDArray[np.uint32]"


@dataclass(frozen=True)
class CacheIndex:
    """The samples of a cache with one file each. Row numbers follow the order in the metadata shards."""

    metadata: CacheMetadata
    bucket_keys: tuple[BucketKey, ...]
    """The buckets, in order of first appearance."""
    shard_lengths: tuple[int, ...]
    names: Any
    """The cache files' names, as an Arrow string array."""
    bucket_of_row: Numbers
    """For each row, its bucket's position in ``bucket_keys``."""
    folders: tuple[str, ...]
    """The folders that rows say, as they are written."""
    folder_of_row: Numbers
    """For each row, its folder's position in ``folders``."""
    locator: FileLocator
    """Finds the files where the cache is now."""

    def __len__(self) -> int:
        return len(self.bucket_of_row)

    def relative_file(self, row: int) -> str:
        """The row's file, relative to the cache: ``512x512/0a1b….meta``."""
        folder = self.folders[int(self.folder_of_row[row])]
        return self.locator.relative_file(folder, self.name(row), self.bucket(row).folder)

    def name(self, row: int) -> str:
        """The name of the row's file."""
        name: str = self.names[row].as_py()
        return name

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
    return index_of_shards([(rows, cache_dir / METADATA_NAME)], metadata, cache_dir, name_aspect)


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
    shards: Iterable[tuple[Sequence[IndexRow], Path]],
    metadata: CacheMetadata,
    cache_dir: Path,
    name_aspect: NameAspect,
) -> CacheIndex:
    """The index of the rows of several metadata shards, each given with its path for error messages."""
    numbers: dict[tuple[Any, ...], int] = {}
    folders: dict[str, int] = {}
    names, key_of_row, folder_of_row, lengths = [], [], [], []
    for rows, path in shards:
        keys = [(r.bucket_resolution or r.crop_resolution, r.aspect_ratio, r.num_frames) for r in rows]
        known = len(numbers)
        key_of_row.append(np.array([numbers.setdefault(k, len(numbers)) for k in keys], dtype=np.int64))
        for key in list(numbers)[known:]:
            _check_key(key, where=f"{path}, row {keys.index(key)}")
        shard_names, shard_folders, folder_numbers = _split_paths(rows, path)
        names.append(shard_names)
        number_of_folder = [folders.setdefault(folder, len(folders)) for folder in shard_folders]
        folder_of_row.append(np.array(number_of_folder, dtype=np.uint32)[folder_numbers])
        lengths.append(len(rows))

    # Rows of one bucket may describe it differently, for example with and without an aspect ratio.
    key_numbers: dict[BucketKey, int] = {}
    number_of_key = np.array(
        [key_numbers.setdefault(_bucket_key(key, name_aspect), len(key_numbers)) for key in numbers],
        dtype=np.uint32,
    )
    return CacheIndex(
        metadata=metadata,
        bucket_keys=tuple(key_numbers),
        shard_lengths=tuple(lengths),
        names=pa.concat_arrays(names),
        bucket_of_row=_compact(number_of_key, len(key_numbers))[np.concatenate(key_of_row)],
        folders=tuple(folders),
        folder_of_row=_compact(np.concatenate(folder_of_row), len(folders)),
        locator=FileLocator(cache_dir),
    )


def _compact(numbers: npt.NDArray[np.uint32], count: int) -> Numbers:
    """The numbers, which are less than ``count``, in two bytes each if they fit: numpy sorts these ten times faster."""
    return numbers.astype(np.uint16) if count <= 1 << 16 else numbers


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


def _split_paths(rows: Sequence[IndexRow], shard: Path) -> tuple[Any, list[str], npt.NDArray[np.int32]]:
    """The names of the rows' files, the distinct folders, and for each row its folder's position among them."""
    paths = pc.replace_substring(pa.array([row.cache_file for row in rows], pa.large_string()), "\\", "/")
    # A slash in front, so that every path splits into two.
    paths = pc.binary_join_element_wise(_NOTHING, paths, _SLASH)
    parts = pc.list_flatten(pc.split_pattern(paths, "/", max_splits=1, reverse=True))
    folders, names = (parts.take(pa.array(np.arange(i, len(parts), 2))) for i in (0, 1))
    bad = pc.is_in(names, pa.array(["", ".", ".."], pa.large_string())).index(True).as_py()
    if bad >= 0:
        raise MetadataError(f"{shard}, row {bad}: cache_file {rows[bad].cache_file!r} is not a file name")
    folders = folders.dictionary_encode()
    return names, [folder[1:] for folder in folders.dictionary.to_pylist()], folders.indices.to_numpy()
