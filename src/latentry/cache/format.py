"""``metadata.json`` and its shards, as NeMo AutoModel's tool and Latentry write them.

Rows are decoded straight into small typed structs (ten times quicker than ``json.load``, and the
fields nobody asked for are never built), so a missing or mistyped field is noticed on opening and
named with its shard and row. The full rows are read again only if somebody looks at one.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

from latentry.errors import CacheNotFoundError, MetadataError
from latentry.storage import path_inside

METADATA_NAME = "metadata.json"
PACKED = "packed"
OUTPUT_FORMATS = ("meta", "pt", "safetensors", PACKED)
PLAIN_VALUES_KEY = "latentry"
TASK_SIZE = 256
ALIGNMENT = 64
"""In bytes, of what batches are read into and of what shards hold; ``torch.save`` has the same. On some processors a
copy takes five times as long where it moves bytes by less than 32 positions within a page."""

T = TypeVar("T")


class GlobalMetadata(msgspec.Struct, kw_only=True):
    """The part of ``metadata.json`` that reading a cache depends on."""

    shards: list[str]
    total_items: int | None = None
    model_type: str | None = None
    processor: str | None = None
    packed: dict[str, Any] | None = None
    """Where samples lie in shards instead of files of their own: what ``packed`` knows about it."""


class Row(msgspec.Struct, gc=False):
    """The part of a sample's row that finding and grouping it depends on."""

    cache_file: str
    bucket_resolution: tuple[int, int] | None = None
    crop_resolution: tuple[int, int] | None = None
    """What early image caches call ``bucket_resolution``."""
    aspect_ratio: float | None = None
    num_frames: int | None = None


_decode_rows = msgspec.json.Decoder(list[Row]).decode
_decode_global = msgspec.json.Decoder(GlobalMetadata).decode


def read_global_metadata(cache_dir: Path) -> GlobalMetadata:
    """Read ``metadata.json``; errors say what the folder lacks to be a cache."""
    if not cache_dir.is_dir():
        raise CacheNotFoundError(f"there is no folder {cache_dir}; cache_dir must name a finished cache")
    path = path_inside(cache_dir, METADATA_NAME)
    if not path.is_file():
        raise CacheNotFoundError(
            f"{cache_dir} has no {METADATA_NAME}: it is not a cache, or its preprocessing has not finished"
        )
    metadata = _decode(path, _decode_global)
    if not metadata.shards and metadata.packed is None:
        raise MetadataError(f"{path} lists no shards: the cache is empty")
    return metadata


def read_rows(cache_dir: Path, shard: str) -> list[Row]:
    """The rows of one shard, checked."""
    return _decode(_shard_path(cache_dir, shard), _decode_rows)


def recipe_fingerprint(recipe: Mapping[str, Any]) -> str:
    """Identifies a resolved recipe, as it is recorded in a cache."""
    return hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=16).hexdigest()


def _shard_path(cache_dir: Path, shard: str) -> Path:
    path = path_inside(cache_dir, shard)
    if not path.is_file():
        raise CacheNotFoundError(f"{cache_dir / METADATA_NAME} lists {shard}, but that file is absent")
    return path


def _decode(path: Path, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(path.read_bytes())
    except msgspec.ValidationError as error:
        raise MetadataError(f"{path}: {str(error).replace('`$', '`').replace('`[', '`row [')}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MetadataError(f"{path} is not valid JSON ({error}); it may be truncated") from None


class LazyRows(Sequence[dict[str, Any]]):
    """Rows as dictionaries, each made when it is looked at."""

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
    """The rows of a cache of files, read from their shards.

    ``cache_file`` is where the file is now, not where it was written. A few shards stay in memory,
    so walking through in order is quick and hopping about is not.
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
        width, height = row.get("bucket_resolution") or row["crop_resolution"]
        return {
            **row,
            "cache_file": str(self._cache_dir / f"{width}x{height}" / file_name(row["cache_file"])),
        }

    def _rows(self, shard: int) -> list[dict[str, Any]]:
        if shard not in self._kept:
            path = _shard_path(self._cache_dir, self._shards[shard])
            self._kept[shard] = _decode(path, msgspec.json.Decoder(list[dict[str, Any]]).decode)
            if len(self._kept) > self._SHARDS_KEPT:
                self._kept.popitem(last=False)
        return self._kept[shard]


def file_name(cache_file: str) -> str:
    """The last part of a path that may come from any machine."""
    return cache_file.replace("\\", "/").rsplit("/", 1)[-1]
