"""Which samples a cache has: opening its index, of either kind.

A cache with one file per sample has a ``CacheIndex``, a packed cache a ``PackedIndex``. Both give row numbers to
samples, group them by bucket, and say which file holds a row.
"""

from __future__ import annotations

import logging
from pathlib import Path

from latentry.cache.format import METADATA_NAME, CacheMetadata, read_index_rows, read_metadata
from latentry.cache.index import saved_index
from latentry.cache.index.file_index import CacheIndex, NameAspect, index_of_shards
from latentry.cache.index.packed_index import PackedIndex
from latentry.errors import MetadataError

logger = logging.getLogger(__name__)

__all__ = ["CacheIndex", "PackedIndex", "open_index"]


def open_index(cache_dir: Path, name_aspect: NameAspect) -> CacheIndex | PackedIndex:
    """The index of the cache in this folder: the saved one if it is current, else read from the metadata
    shards and saved if it is large.

    Args:
        cache_dir: A finished cache.
        name_aspect: Names the aspect ratio of a bucket. A packed cache stores its buckets' names.
    """
    metadata = read_metadata(cache_dir)
    if metadata.packed is not None:
        packed = PackedIndex(cache_dir, metadata)
        _check_count(cache_dir, metadata, len(packed))
        return packed
    signature = saved_index.signature_of(cache_dir, metadata.shards)
    index = saved_index.load(cache_dir, metadata, signature)
    if index is None:
        shards = ((read_index_rows(cache_dir, shard), cache_dir / shard) for shard in metadata.shards)
        index = index_of_shards(shards, metadata, cache_dir, name_aspect)
        saved_index.save(cache_dir, index, signature)
    _check_count(cache_dir, metadata, len(index))
    return index


def _check_count(cache_dir: Path, metadata: CacheMetadata, found: int) -> None:
    if not found:
        raise MetadataError(f"{cache_dir} holds no samples: its shards are empty")
    if metadata.total_items not in (None, found):
        logger.warning(
            "%s says %d items, but the cache has %d rows, which are used; the preprocessing was interrupted, or a "
            "metadata shard was replaced",
            cache_dir / METADATA_NAME,
            metadata.total_items,
            found,
        )
