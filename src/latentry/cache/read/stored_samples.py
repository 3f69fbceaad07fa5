"""Samples by their rows, for a run that takes them from the cache it adds to.

The cache may be unfinished, so there is no index to read them with. Their checksums are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from latentry.cache.format import Row
from latentry.cache.locator import FileLocator
from latentry.cache.packed_format import caption_of_part
from latentry.cache.read.batch_buffers import BatchBuffers
from latentry.cache.read.buffer_pool import BufferPool
from latentry.cache.read.files import load_cache_file
from latentry.cache.read.shard_files import OpenShards, row_buffers
from latentry.errors import CacheFileError
from latentry.storage import content_digest


class StoredSamples:
    """Loads whole samples, in any number of threads."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._locator = FileLocator(cache_dir)
        self._shards = OpenShards(cache_dir)

    def load(self, row: Row) -> dict[str, Any]:
        """The sample's dictionary. Raises ``CacheError`` if it is not what was written."""
        if row.packed is None:
            (file,) = row.files(self._locator)
            data = load_cache_file(self._cache_dir, file)
            if content_digest(self._cache_dir / file) != row.file_digest:
                raise CacheFileError(f"{self._cache_dir / file}: the checksum differs")
            return data
        tensors: dict[str, torch.Tensor] = {}
        for part, location in row.packed.locations.items():
            buffers = BatchBuffers(1, BufferPool(pin_memory=False))
            memory = row_buffers(0, location, frozenset(), buffers, caption_of_part(part))
            self._shards.fill(location, memory)
            for name, column in buffers.columns().items():
                tensor = column[0]
                assert tensor is not None, f"{name} was read"
                tensors[name] = tensor
        return row.packed.dictionary(row.to_dict(), tensors)
