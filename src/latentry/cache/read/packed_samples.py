"""Samples of a packed cache: each part of a sample is one read, straight into the batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from latentry.cache.caption_keys import drawn_caption, num_captions, one_caption
from latentry.cache.index.packed_index import PackedIndex
from latentry.cache.index.rows import LazyRows, Rows
from latentry.cache.packed_format import PackedEntry, RowLocation, caption_of_part, text_part
from latentry.cache.read.batch_buffers import BatchBuffers
from latentry.cache.read.columns import Column, Columns
from latentry.cache.read.fields import FileFields, with_row_values
from latentry.cache.read.read_threads import ReadThreads
from latentry.cache.read.resources import ReadResources
from latentry.cache.read.shard_files import OpenShards, row_buffers


class PackedSamples:
    """Reads samples from shards.

    The checksum of a shard row is compared the first time that this process reads it. That finds damage on the disk,
    and costs nothing in later epochs.

    Args:
        cache_dir: The cache.
        index: Its index.
        rows: The samples' rows.
        row_numbers: Which of the index's rows these samples are; None for all.
    """

    def __init__(
        self,
        cache_dir: Path,
        index: PackedIndex,
        rows: Rows,
        row_numbers: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._index = index
        self._rows = rows
        self._row_numbers = row_numbers
        self._shards = OpenShards(cache_dir)
        self._checked = {part: np.zeros(len(index) // 8 + 1, np.uint8) for part in index.parts}

    def some(self, rows: Rows, row_numbers: Sequence[int]) -> PackedSamples:
        """Only these rows of the cache, which may have been changed."""
        return PackedSamples(self._shards.cache_dir, self._index, rows, np.array(row_numbers, dtype=np.int64))

    def name(self, row: int) -> str:
        """The name that the sample's file has, or had, in a cache with one file per sample."""
        return self._index.entry(self._row(row)).name

    def _row(self, row: int) -> int:
        return row if self._row_numbers is None else int(self._row_numbers[row])

    def describe(self, row: int) -> str:
        return self._shards.describe(self._index.location(self._row(row), "latents"))

    def file(self, row: int) -> str:
        return self._index.relative_file(self._row(row))

    def files(self, row: int) -> list[str]:
        return [location.file for location in self._index.entry(self._row(row)).locations.values()]

    def load(self, row: int) -> dict[str, Any]:
        row = self._row(row)
        entry = self._index.entry(row)
        resources = ReadResources(threads=ReadThreads(1))
        tensors = self._read_tensors([row], [entry], frozenset(), resources)
        return entry.dictionary(self._index.row(row), {name: column[0] for name, column in tensors.items()})

    def read(
        self,
        rows: Sequence[int],
        fields: FileFields,
        resources: ReadResources | None = None,
        draws: Sequence[int | None] | None = None,
    ) -> Columns:
        numbers = [self._row(row) for row in rows]
        entries = [self._index.entry(number) for number in numbers]
        captions: list[int] = []
        values: dict[str, list[Any]] = {}
        unserved = fields.unserved
        for i, (row, entry, number) in enumerate(zip(rows, entries, numbers, strict=True)):
            written = self._index.row(number)
            contents = entry.dictionary(written, {})
            given = written if isinstance(self._rows, LazyRows) else self._rows[row]
            contents = with_row_values(contents, given, fields)
            if not fields.all_captions:
                draw = None if draws is None else draws[i]
                captions.append(drawn_caption(draw, entry.name, given, num_captions(contents)))
                contents = one_caption(contents, captions[i])
            for name, value in contents.items():
                if name in unserved or value is None:
                    continue
                if name not in values:
                    values[name] = [None] * len(rows)
                values[name][i] = value
        tensors = self._read_tensors(
            numbers, entries, fields.unserved, resources or ReadResources(), captions
        )
        folder = str(self._shards.cache_dir)
        values["cache_file"] = [
            f"{folder}/{entry.locations['latents'].file}" if "latents" in entry.locations else None
            for entry in entries
        ]
        return Columns(len(rows), tensors, values, lambda i: self.describe(rows[i]))

    def _read_tensors(
        self,
        numbers: Sequence[int],
        entries: Sequence[PackedEntry],
        unserved: Collection[str],
        resources: ReadResources,
        captions: Sequence[int] | None = None,
    ) -> dict[str, Column]:
        """All tensors of these rows but the unserved ones. A part is read as a whole if it holds one that is served.

        ``captions`` says for each row which caption is read. By default all are.
        """
        buffers = BatchBuffers(len(numbers), resources.buffers)
        reads: list[Callable[[], None]] = []
        num_bytes = 0
        for part in sorted(self._index.parts):
            if captions and caption_of_part(part):
                continue
            for i, entry in enumerate(entries):
                chosen = text_part(captions[i]) if captions and part == "text" else part
                location = entry.locations.get(chosen)
                if location is not None and any(layout.name not in unserved for layout in location.tensors):
                    memory = row_buffers(i, location, unserved, buffers, caption_of_part(part))
                    reads.append(partial(self._fill, numbers[i], chosen, location, memory))
                    num_bytes += location.num_bytes
        resources.threads.run(reads, num_bytes)
        return buffers.columns()

    def _fill(self, number: int, part: str, location: RowLocation, memory: Sequence[Any]) -> None:
        checked, bit = self._checked[part], 1 << (number & 7)
        self._shards.fill(location, memory, check=not checked[number >> 3] & bit)
        checked[number >> 3] |= bit  # if two threads do this at once, a row may be checked again
