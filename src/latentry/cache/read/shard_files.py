"""The shard files of a packed cache: opened on first use, read one shard row at a time, checked by checksum."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from latentry.cache.caption_keys import caption_key
from latentry.cache.packed_format import RowLocation, checksum
from latentry.cache.read.batch_buffers import BatchBuffers
from latentry.errors import CacheFileError, CacheNotFoundError
from latentry.storage import OpenFile, OpenFiles


class OpenShards:
    """The shards of a cache. The most recently used ones stay open. Several threads may read at once."""

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir
        self._files = OpenFiles(cache_dir)

    def path(self, file: str) -> Path:
        """The path of a shard, whose name is relative to the cache."""
        return self.cache_dir / file

    def describe(self, location: RowLocation) -> str:
        """The shard and the shard row, for error messages."""
        return f"{self.path(location.file)}, row {location.row}"

    def check(self, location: RowLocation) -> None:
        """Raise ``CacheFileError`` if the shard row cannot be read or its checksum differs."""
        self.fill(location, [bytearray(location.num_bytes)])

    def fill(self, location: RowLocation, buffers: Sequence[Any], *, check: bool = True) -> None:
        """Read a shard row into these buffers, one after the other, and compare its checksum unless told not to."""
        file = self._file(location.file)
        if location.offset + location.num_bytes > file.size_bytes:
            raise self._truncated(location)
        waiting = [buffer for buffer in buffers if len(buffer)]
        position = location.offset
        while waiting:
            try:
                count = os.preadv(file.descriptor, waiting, position)
            except OSError as error:
                raise CacheFileError(f"{self.describe(location)}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise self._truncated(location)
            position += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if count:
                waiting[0] = memoryview(waiting[0])[count:]
        if check and checksum(buffers) != location.checksum:
            raise CacheFileError(
                f"{self.describe(location)}: the checksum differs: its bytes are not those that were written; "
                "rerun the command that made the cache with --verify to encode it again"
            )

    def _truncated(self, location: RowLocation) -> CacheFileError:
        return CacheFileError(
            f"{self.describe(location)}: the file ends before the row does; it is truncated"
        )

    def _file(self, name: str) -> OpenFile:
        try:
            return self._files.get(name)
        except FileNotFoundError:
            raise CacheNotFoundError(
                f"{self.path(name)} is missing, but the cache's index lists it"
            ) from None
        except OSError as error:
            raise CacheFileError(f"{self.path(name)} cannot be read: {error.strerror}") from None


def row_buffers(
    i: int, location: RowLocation, unserved: Collection[str], batch: BatchBuffers, caption: int = 0
) -> list[Any]:
    """Memory for all bytes of a shard row: in the batch for tensors that are served, discarded for the others.

    Args:
        i: The sample's number in the batch.
        location: The shard row.
        unserved: The tensors to discard.
        batch: Where the others go.
        caption: They get the names of this caption's tensors.
    """
    buffers: list[Any] = []
    for layout in location.tensors:
        size, name = layout.num_bytes, caption_key(layout.name, caption)
        if layout.name in unserved:
            buffers.append(bytearray(size))
            continue
        buffer = batch.buffer(i, name, layout.torch_dtype, layout.shape)
        if size < len(buffer):  # positions that are zero at the end of the tensor are not stored
            buffer[size:] = 0
            buffer = buffer[:size]
        buffers.append(buffer)
    return buffers
