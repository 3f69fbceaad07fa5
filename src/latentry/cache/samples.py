"""Samples by row number: one at a time, or a whole batch straight into the memory it is trained from.

Two forms, one face. Where samples have files of their own, each is opened; in a packed cache each part of a
sample is one read into its place in the batch, and nothing is copied again after that.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from latentry.cache.files import load_cache_file
from latentry.cache.index import CacheIndex
from latentry.cache.memory import BatchMemory
from latentry.cache.packed import PackedIndex, part_of
from latentry.cache.shards import Layout, Place, checksum
from latentry.errors import CacheFileError, CacheNotFoundError
from latentry.storage import inside

_FILES_KEPT_OPEN = 256
Dictionary = dict[str, Any]


class Samples(Protocol):
    def where(self, row: int) -> str:
        """The sample's place, for people."""

    def files(self, row: int) -> list[str]:
        """The files that hold something of it, relative to the cache."""

    def load(self, row: int) -> Dictionary:
        """Everything that is stored of a sample."""

    def load_many(self, rows: Sequence[int], names: Collection[str], memory: BatchMemory) -> list[Dictionary]:
        """Several samples, with these tensors and all plain values; tensors lie side by side in ``memory``."""


def open_samples(cache_dir: Path, index: CacheIndex | PackedIndex) -> Samples:
    """The samples that an index lists."""
    return (
        PackedSamples(cache_dir, index) if isinstance(index, PackedIndex) else FileSamples(cache_dir, index)
    )


class FileSamples:
    """Samples that have files of their own."""

    def __init__(self, cache_dir: Path, index: CacheIndex) -> None:
        self._cache_dir = cache_dir
        self._index = index

    def where(self, row: int) -> str:
        return str(self._cache_dir / self._index.relative_file(row))

    def files(self, row: int) -> list[str]:
        return [self._index.relative_file(row)]

    def load(self, row: int) -> Dictionary:
        return load_cache_file(self._cache_dir, self._index.relative_file(row))

    def load_many(self, rows: Sequence[int], names: Collection[str], memory: BatchMemory) -> list[Dictionary]:
        bases: dict[str, torch.Tensor] = {}
        samples = []
        for i, row in enumerate(rows):
            data = load_cache_file(self._cache_dir, self._index.relative_file(row), map_tensors=True)
            for name in names:
                value = data.get(name)
                if not isinstance(value, torch.Tensor):
                    continue
                if name not in bases:
                    bases[name] = memory.empty((len(rows), *value.shape), value.dtype)
                base = bases[name]
                if (base.dtype, base.shape[1:]) == (value.dtype, value.shape):
                    data[name] = base[i].copy_(value)
                else:
                    data[name] = value.clone()
            samples.append({k: v for k, v in data.items() if k in names or not isinstance(v, torch.Tensor)})
        return samples


class PackedSamples:
    """Samples of a packed cache; ``row_numbers`` are those of some of them, or None for all."""

    def __init__(
        self, cache_dir: Path, index: PackedIndex, row_numbers: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._index = index
        self._row_numbers = row_numbers
        self._shards = OpenShards(cache_dir)

    def some(self, rows: Sequence[int]) -> PackedSamples:
        """Only these of the cache's samples."""
        return PackedSamples(self._shards.cache_dir, self._index, np.array(rows, dtype=np.int64))

    def _row(self, row: int) -> int:
        return row if self._row_numbers is None else int(self._row_numbers[row])

    def where(self, row: int) -> str:
        place = self._index.place(self._row(row), "latents")
        return f"{self._shards.path(place.file)}, row {place.row}"

    def files(self, row: int) -> list[str]:
        return [place.file for place in self._index.entry(self._row(row)).places.values()]

    def load(self, row: int) -> Dictionary:
        entry = self._index.entry(self._row(row))
        names = {layout.name for place in entry.places.values() for layout in place.tensors}
        return self.load_many([row], names, BatchMemory())[0]

    def load_many(self, rows: Sequence[int], names: Collection[str], memory: BatchMemory) -> list[Dictionary]:
        rows = [self._row(row) for row in rows]
        entries = [self._index.entry(row) for row in rows]
        tensors: list[dict[str, torch.Tensor]] = [{} for _ in rows]
        for part in {part_of(name) for name in names}:
            places = [entry.places.get(part) for entry in entries]
            bases = _side_by_side(places, names, memory)
            for i, place in enumerate(places):
                if place is not None:
                    tensors[i] |= self._shards.read(
                        place, {name: base[i] for name, base in bases.items()}, names
                    )
        wanted = []
        for entry, row, found in zip(entries, rows, tensors, strict=True):
            data = entry.dictionary(self._index.row(row), found)
            stored = {layout.name for place in entry.places.values() for layout in place.tensors}
            wanted.append({k: v for k, v in data.items() if k in found or k not in stored})
        return wanted


def _side_by_side(
    places: Sequence[Place | None], names: Collection[str], memory: BatchMemory
) -> dict[str, torch.Tensor]:
    """For each tensor that all samples have in one shape, the batch of it; still empty."""
    first = places[0]
    if first is None:
        return {}
    bases = {}
    for layout in first.tensors:
        alike = all(place is not None and _fits(place, layout) for place in places)
        if layout.name in names and alike:
            bases[layout.name] = memory.empty((len(places), *layout.shape), layout.torch_dtype)
    return bases


def _fits(place: Place, layout: Layout) -> bool:
    return any(
        (other.name, other.dtype, other.shape) == (layout.name, layout.dtype, layout.shape)
        for other in place.tensors
    )


class _File:
    """An open file, closed when nobody uses it any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class OpenShards:
    """The shards of a cache, opened as they are needed; the last few stay open. For any number of threads."""

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()
        self._scratch = threading.local()

    def path(self, file: str) -> Path:
        return self.cache_dir / file

    def read(
        self, place: Place, into: Mapping[str, torch.Tensor], names: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """A row's tensors of these names, read into the given ones, or into new ones where there are none."""
        found: dict[str, torch.Tensor] = {}
        buffers: list[memoryview] = []
        unwanted = 0
        for layout in place.tensors:
            if layout.name not in names:
                buffers.append(self._unwanted(unwanted, layout.num_bytes))
                unwanted += layout.num_bytes
                continue
            tensor = into.get(layout.name)
            if tensor is None:
                tensor = torch.empty(layout.shape, dtype=layout.torch_dtype)
            found[layout.name] = tensor
            if not tensor.numel():
                continue
            raw: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
            raw[layout.num_bytes :] = 0
            buffers.append(raw.data[: layout.num_bytes])
        self._fill(place, buffers)
        return found

    def _unwanted(self, start: int, num_bytes: int) -> memoryview:
        room = getattr(self._scratch, "room", bytearray())
        if len(room) < start + num_bytes:
            # Views of the smaller one stay valid for the reads they are for.
            room = self._scratch.room = bytearray(start + num_bytes)
        return memoryview(room)[start : start + num_bytes]

    def check(self, place: Place) -> None:
        """An error if the row is not what was written."""
        self._fill(place, [memoryview(bytearray(place.num_bytes))])

    def _fill(self, place: Place, buffers: Sequence[memoryview]) -> None:
        file = self._file(place.file)
        where = f"{self.path(place.file)}, row {place.row}"
        waiting = [buffer for buffer in buffers if len(buffer)]
        position = place.offset
        while waiting:
            try:
                count = os.preadv(file.descriptor, waiting, position)
            except OSError as error:
                raise CacheFileError(f"{where}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise CacheFileError(f"{where}: the file ends before the row does; it was cut short")
            position += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if count:
                waiting[0] = waiting[0][count:]
        if checksum(buffers) != place.checksum:
            raise CacheFileError(
                f"{where}: its bytes are not those that were written: the checksum differs; the command that "
                "made the cache encodes it again with --verify"
            )

    def _file(self, name: str) -> _File:
        with self._lock:
            file = self._files.get(name)
            if file is None:
                path = inside(self.cache_dir, name)
                try:
                    file = self._files[name] = _File(path)
                except FileNotFoundError:
                    raise CacheNotFoundError(f"{path} is absent, but the cache's index lists it") from None
                except OSError as error:
                    raise CacheFileError(f"{path} cannot be read: {error.strerror}") from None
                if len(self._files) > _FILES_KEPT_OPEN:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(name)
            return file
