"""The cache as columns: for each sample its file's name and its bucket, and nothing else.

A training run needs no more than that to order and find its samples; everything else is in the
cache file. Ten million rows are half a gigabyte of columns instead of a hundred million Python
objects. Reading the JSON shards takes about 2 µs a row, so from ``SAVE_FROM_ROWS`` rows on the
index is kept beside them as ``index.arrow`` (where the folder can be written to) and later opened by
memory map, shared by all ranks and workers of a machine. It is derived: a changed ``metadata.json``
or a shard of another size or time makes it invalid, and deleting it loses nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from latentry.cache.format import (
    METADATA_NAME,
    GlobalMetadata,
    Row,
    file_name,
    read_global_metadata,
    read_rows,
)
from latentry.cache.packed.index import PackedIndex
from latentry.errors import MetadataError
from latentry.storage import path_inside, publish
from latentry.types import BucketShape

logger = logging.getLogger(__name__)

INDEX_NAME = "index.arrow"
INDEX_VERSION = 1
SAVE_FROM_ROWS = 100_000
_SCHEMA_KEY = b"latentry"


@dataclass(frozen=True)
class CacheIndex:
    """Which samples a cache has. Row numbers are the order of the rows in the shards."""

    metadata: GlobalMetadata
    shapes: tuple[BucketShape, ...]
    """The buckets that occur, in order of first appearance."""
    shard_lengths: tuple[int, ...]
    names: Any
    """The cache files' names, as an Arrow string array."""
    shape_of_row: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    """For each row, its bucket's position in ``shapes``."""

    def __len__(self) -> int:
        return len(self.shape_of_row)

    def relative_file(self, row: int) -> str:
        """Where in the cache the row's file is: ``512x512/0a1b….meta``."""
        return f"{self.shape(row).folder}/{self.names[row].as_py()}"

    def shape(self, row: int) -> BucketShape:
        return self.shapes[int(self.shape_of_row[row])]

    def rows_by_shape(self) -> list[npt.NDArray[np.int64]]:
        """For each shape its row numbers, ascending."""
        order = np.argsort(self.shape_of_row, kind="stable")
        counts = np.bincount(self.shape_of_row, minlength=len(self.shapes))
        return np.split(order, np.cumsum(counts)[:-1])

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same files in the same order, wherever the cache lies."""
        digest = hashlib.blake2b(repr(self.shapes).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.shape_of_row).data)
        _, offsets, characters = self.names.buffers()
        ends = np.frombuffer(offsets, dtype=np.int64, count=len(self) + 1)
        digest.update(ends.data)
        digest.update(memoryview(characters)[: ends[-1]])  # what Arrow pads it with does not count
        return digest.hexdigest()


def open_index(cache_dir: Path, name_aspect: Callable[[float], str]) -> CacheIndex | PackedIndex:
    """The index of the cache in this folder: the kept one if it is current, else read from the shards.

    ``name_aspect`` gives an aspect ratio the name that is part of its bucket's key; a packed cache has its
    buckets named already.
    """
    metadata = read_global_metadata(cache_dir)
    if metadata.packed is not None:
        packed = PackedIndex(cache_dir, metadata)
        _check_count(cache_dir, metadata, len(packed))
        return packed
    signature = _signature(cache_dir, metadata.shards)
    index = _load(path_inside(cache_dir, INDEX_NAME), metadata, signature)
    if index is None:
        index = _read_shards(cache_dir, metadata, name_aspect)
        if len(index) >= SAVE_FROM_ROWS:
            _save(cache_dir / INDEX_NAME, index, signature)
    _check_count(cache_dir, metadata, len(index))
    return index


def _check_count(cache_dir: Path, metadata: GlobalMetadata, found: int) -> None:
    if not found:
        raise MetadataError(f"{cache_dir} holds no samples: its shards are empty")
    if metadata.total_items not in (None, found):
        raise MetadataError(
            f"{cache_dir / METADATA_NAME} promises {metadata.total_items} items, but its shards hold "
            f"{found}; the preprocessing was cut short or a shard was replaced: run it again"
        )


# ---- from the JSON shards -------------------------------------------------------------------


def _read_shards(
    cache_dir: Path, metadata: GlobalMetadata, name_aspect: Callable[[float], str]
) -> CacheIndex:
    shards = ((read_rows(cache_dir, shard), cache_dir / shard) for shard in metadata.shards)
    return _columns(shards, metadata, name_aspect)


def index_of_rows(
    rows: Sequence[dict[str, Any]],
    metadata: GlobalMetadata,
    cache_dir: Path,
    name_aspect: Callable[[float], str],
) -> CacheIndex:
    """The index of these rows alone: some of a cache's, say."""
    try:
        checked = msgspec.convert(list(rows), list[Row])
    except msgspec.ValidationError as error:
        raise MetadataError(f"the rows given for {cache_dir}: {error}") from None
    return _columns([(checked, cache_dir / METADATA_NAME)], metadata, name_aspect)


def _columns(
    shards: Iterable[tuple[list[Row], Path]], metadata: GlobalMetadata, name_aspect: Callable[[float], str]
) -> CacheIndex:
    numbers: dict[tuple[Any, ...], int] = {}
    names, shape_of_row, lengths = [], [], []
    for rows, path in shards:
        keys = [(r.bucket_resolution or r.crop_resolution, r.aspect_ratio, r.num_frames) for r in rows]
        known = len(numbers)
        shape_of_row.append(np.array([numbers.setdefault(k, len(numbers)) for k in keys], dtype=np.int64))
        for key in list(numbers)[known:]:
            _check_key(key, where=f"{path}, row {keys.index(key)}")
        names.append(pa.array(_safe_names(rows, path), type=pa.large_string()))
        lengths.append(len(rows))

    # Rows of one bucket may spell it differently (with and without an aspect ratio, say).
    shape_numbers: dict[BucketShape, int] = {}
    shape_of_key = np.array(
        [shape_numbers.setdefault(_shape(key, name_aspect), len(shape_numbers)) for key in numbers],
        dtype=np.uint32,
    )
    if len(shape_numbers) <= 1 << 16:
        shape_of_key = shape_of_key.astype(np.uint16)  # numpy sorts these ten times quicker
    return CacheIndex(
        metadata=metadata,
        shapes=tuple(shape_numbers),
        shard_lengths=tuple(lengths),
        names=pa.concat_arrays(names),
        shape_of_row=shape_of_key[np.concatenate(shape_of_row)],
    )


def _check_key(key: tuple[Any, ...], where: str) -> None:
    resolution, _, num_frames = key
    if resolution is None:
        raise MetadataError(f"{where}: the row has no bucket_resolution")
    if min(resolution) < 1:
        raise MetadataError(f"{where}: bucket_resolution is {list(resolution)}; both sides must be positive")
    if num_frames is not None and num_frames < 1:
        raise MetadataError(f"{where}: num_frames is {num_frames}; it must be positive")


def _shape(key: tuple[Any, ...], name_aspect: Callable[[float], str]) -> BucketShape:
    (width, height), aspect_ratio, num_frames = key
    aspect_name = name_aspect(width / height if aspect_ratio is None else aspect_ratio)
    return BucketShape(width, height, aspect_name, num_frames)


def _safe_names(rows: Sequence[Row], shard: Path) -> list[str]:
    names = [file_name(row.cache_file) for row in rows]
    for bad in {"", ".", ".."}.intersection(names):
        row = names.index(bad)
        raise MetadataError(f"{shard}, row {row}: cache_file {rows[row].cache_file!r} names no file")
    return names


# ---- kept as Arrow --------------------------------------------------------------------------


class _Header(msgspec.Struct):
    version: int
    signature: str
    fingerprint: str
    shapes: list[dict[str, Any]]
    shard_lengths: list[int]


def _signature(cache_dir: Path, shards: Sequence[str]) -> str:
    """Changes with ``metadata.json`` and with any shard's size or time; costs one ``stat`` a shard."""
    digest = hashlib.blake2b((cache_dir / METADATA_NAME).read_bytes(), digest_size=16)
    for shard in shards:
        path = path_inside(cache_dir, shard)
        status = path.stat() if path.is_file() else None
        digest.update(f"{shard} {status and (status.st_size, status.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


def _save(path: Path, index: CacheIndex, signature: str) -> None:
    shapes = [asdict(shape) for shape in index.shapes]
    header = _Header(INDEX_VERSION, signature, index.fingerprint, shapes, list(index.shard_lengths))
    table = pa.table({"name": index.names, "shape": index.shape_of_row})
    table = table.replace_schema_metadata({_SCHEMA_KEY: msgspec.json.encode(header)})
    try:
        with publish(path) as draft, pa.ipc.new_file(str(draft), table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        logger.info(
            "the index of %s is not kept (%s); every opening will read the shards", path.parent, error
        )


def _load(path: Path, metadata: GlobalMetadata, signature: str) -> CacheIndex | None:
    """The kept index, or None if there is none that is of this version and belongs to these shards."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        header = msgspec.json.decode(reader.schema.metadata[_SCHEMA_KEY], type=_Header)
        if (header.version, header.signature) != (INDEX_VERSION, signature):
            return None
        batch = reader.get_batch(0)
        # Arrow trusts offsets: unchecked, a flipped bit in them ends the process rather than the reading.
        batch.validate(full=True)
        index = CacheIndex(
            metadata=metadata,
            shapes=tuple(msgspec.convert(header.shapes, list[BucketShape])),
            shard_lengths=tuple(header.shard_lengths),
            names=batch.column("name"),
            shape_of_row=batch.column("shape").to_numpy(),
        )
        if not (
            index.names.type == pa.large_string()
            and index.names.null_count == 0
            and index.shape_of_row.dtype in (np.uint16, np.uint32)
            and len(index) == len(index.names) == sum(index.shard_lengths)
            and int(index.shape_of_row.max(initial=0)) < len(index.shapes)
            and index.fingerprint == header.fingerprint
        ):
            raise ValueError("its columns do not fit together")
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s is damaged (%s); reading the metadata shards instead", path, error)
        return None
    return index
