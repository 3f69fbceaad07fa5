"""The samples of a cache by row number, whichever form the cache has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from latentry.cache.index import CacheIndex
from latentry.cache.index.packed_index import PackedIndex
from latentry.cache.read.columns import Columns
from latentry.cache.read.file_samples import FileSamples
from latentry.cache.read.packed_samples import PackedSamples
from latentry.cache.read.resources import ReadResources


class Samples(Protocol):
    """Reads samples: one whole sample, or some fields of many at once."""

    def describe(self, row: int) -> str:
        """Where the sample is stored, for error messages."""

    def file(self, row: int) -> str:
        """The file that holds its latents, relative to the cache."""

    def files(self, row: int) -> list[str]:
        """All files that hold a part of it, relative to the cache."""

    def load(self, row: int) -> dict[str, Any]:
        """Everything that is stored of a sample, as a cache file would hold it."""

    def read(
        self,
        rows: Sequence[int],
        names: Collection[str],
        resources: ReadResources | None = None,
        draws: Sequence[int | None] | None = None,
    ) -> Columns:
        """These fields of several samples, as they are stored, and each sample's path as ``cache_file``.

        Args:
            rows: The samples' row numbers.
            names: Tensors and plain values to read; a sample need not have them all.
            resources: Memory and threads to read with; new ones by default.
            draws: A number for each sample, which decides the caption that is read of several. None reads the first
                caption.
        """


def open_samples(cache_dir: Path, index: CacheIndex | PackedIndex) -> Samples:
    """The samples that an index lists."""
    if isinstance(index, PackedIndex):
        return PackedSamples(cache_dir, index)
    return FileSamples(cache_dir, index)
