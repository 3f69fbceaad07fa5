"""Samples of a packed cache: each part of a sample is one read, straight into the batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from latentry.cache.caption_keys import drawn_caption, num_captions, one_caption
from latentry.cache.index.packed_index import PackedIndex
from latentry.cache.packed_format import PackedEntry, RowLocation, caption_of_part, part_of, text_part
from latentry.cache.read.batch_buffers import BatchBuffers
from latentry.cache.read.columns import Column, Columns
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
        row_numbers: Which of the index's rows these samples are; None for all.
    """

    def __init__(
        self, cache_dir: Path, index: PackedIndex, row_numbers: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._index = index
        self._row_numbers = row_numbers
        self._shards = OpenShards(cache_dir)
        self._checked = {part: np.zeros(len(index) // 8 + 1, np.uint8) for part in index.parts}

    def some(self, rows: Sequence[int]) -> PackedSamples:
        """Only these rows of the cache."""
        return PackedSamples(self._shards.cache_dir, self._index, np.array(rows, dtype=np.int64))

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
        tensors = self._read_tensors([row], [entry], entry.tensor_names, resources, [0])
        return entry.dictionary(self._index.row(row), {name: column[0] for name, column in tensors.items()})

    def read(
        self,
        rows: Sequence[int],
        names: Collection[str],
        resources: ReadResources | None = None,
        draws: Sequence[int | None] | None = None,
    ) -> Columns:
        numbers = [self._row(row) for row in rows]
        entries = [self._index.entry(number) for number in numbers]
        names = frozenset(names)
        index_rows = [self._index.row(number) for number in numbers]
        stored = [entry.dictionary(row, {}) for entry, row in zip(entries, index_rows, strict=True)]
        captions = [0] * len(rows)
        for i, draw in enumerate(draws or ()):
            if draw is not None and (count := num_captions(stored[i])) > 1:
                captions[i] = drawn_caption(draw, entries[i].name, index_rows[i].get("repeat", 0), count)
                stored[i] = one_caption(stored[i], captions[i])
        tensors = self._read_tensors(numbers, entries, names, resources or ReadResources(), captions)
        values: dict[str, list[Any]] = {}
        for name in names:
            if not isinstance(tensors.get(name), torch.Tensor):
                found = [sample.get(name) for sample in stored]
                if found.count(None) < len(found):
                    values[name] = found
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
        names: Collection[str],
        resources: ReadResources,
        captions: Sequence[int],
    ) -> dict[str, Column]:
        """The named tensors of these rows. A part is read as a whole if it holds one of them.

        ``captions`` says for each row which caption's tensors take the names of the first one's.
        """
        buffers = BatchBuffers(len(numbers), resources.buffers)
        reads: list[Callable[[], None]] = []
        num_bytes = 0
        for part in sorted({part_of(name) for name in names}.intersection(self._index.parts)):
            for i, entry in enumerate(entries):
                chosen = text_part(captions[i]) if part == "text" else part
                location = entry.locations.get(chosen)
                if location is not None:
                    memory = row_buffers(i, location, names, buffers, caption_of_part(part))
                    reads.append(partial(self._fill, numbers[i], chosen, location, memory))
                    num_bytes += location.num_bytes
        resources.threads.run(reads, num_bytes)
        return buffers.columns()

    def _fill(self, number: int, part: str, location: RowLocation, memory: Sequence[Any]) -> None:
        checked, bit = self._checked[part], 1 << (number & 7)
        self._shards.fill(location, memory, check=not checked[number >> 3] & bit)
        checked[number >> 3] |= bit  # if two threads do this at once, a row may be checked again
