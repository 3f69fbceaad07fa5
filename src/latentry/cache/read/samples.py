"""Samples by row number: one at a time, or a whole batch straight into the memory it is trained from.

Two forms, one face. Where samples have files of their own, each is opened; in a packed cache each part of a
sample is one read into its place in the batch, and nothing is copied again after that.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from latentry.cache.index import CacheIndex
from latentry.cache.index.packed_index import PackedIndex
from latentry.cache.packed_format import PackedEntry, RowLocation, checksum, names_of, part_of
from latentry.cache.read.batch_buffers import BatchBuffers, Loaded, plain_tensor
from latentry.cache.read.buffer_pool import BufferPool
from latentry.cache.read.file_contents import TensorLocation, read_contents
from latentry.cache.read.files import load_cache_file
from latentry.cache.read.read_threads import ReadThreads
from latentry.errors import CacheFileError, CacheNotFoundError
from latentry.storage import KnownFolders, inside, open_regular

_FILES_KEPT_OPEN = 256
_FILES_AT_ONCE = 64
Dictionary = dict[str, Any]


class Samples(Protocol):
    def describe(self, row: int) -> str:
        """The sample's place, for people."""

    def file(self, row: int) -> str:
        """The file that holds its latents, relative to the cache."""

    def files(self, row: int) -> list[str]:
        """The files that hold something of it, relative to the cache."""

    def load(self, row: int) -> Dictionary:
        """Everything that is stored of a sample."""

    def load_many(
        self, rows: Sequence[int], names: Collection[str], memory: BufferPool, reads: ReadThreads
    ) -> Loaded:
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
        self._folders = KnownFolders(cache_dir)

    def describe(self, row: int) -> str:
        return str(self._cache_dir / self._index.relative_file(row))

    def file(self, row: int) -> str:
        return self._index.relative_file(row)

    def files(self, row: int) -> list[str]:
        return [self.file(row)]

    def load(self, row: int) -> Dictionary:
        return load_cache_file(self._cache_dir, self._index.relative_file(row))

    def load_many(
        self, rows: Sequence[int], names: Collection[str], memory: BufferPool, reads: ReadThreads
    ) -> Loaded:
        batch = _FileBatch(len(rows), names, memory)
        for start in range(0, len(rows), _FILES_AT_ONCE):
            with ExitStack() as files:
                for row in rows[start : start + _FILES_AT_ONCE]:
                    relative = self._index.relative_file(row)
                    file = files.enter_context(_opened(self._folders.inside(relative)))
                    data = read_contents(file.descriptor, os.path.splitext(relative)[1])
                    if data is None:
                        data = load_cache_file(self._cache_dir, relative)
                    batch.add(file, data)
                batch.read(reads)
        return batch.loaded()


class _FileBatch:
    """Samples as they are put together: first where everything goes, then all reads at once."""

    def __init__(self, count: int, names: Collection[str], memory: BufferPool) -> None:
        self._names = names
        self._rooms = BatchBuffers(count, memory)
        self._values: list[Dictionary] = []
        self._waiting: list[Callable[[], None]] = []
        self._num_bytes = 0

    def add(self, file: _OpenFile, data: Dictionary) -> None:
        """The next sample: what its file holds, tensors that are wanted to be read or copied into place."""
        number, values = len(self._values), {}
        for name, value in data.items():
            if isinstance(value, TensorLocation):
                if name in self._names:
                    buffer = self._rooms.buffer(number, name, value.dtype, value.shape)
                    self._waiting.append(partial(_read_into, buffer, file, value.offset))
                    self._num_bytes += value.num_bytes
            elif not isinstance(value, torch.Tensor):
                values[name] = value
            elif name in self._names:
                self._rooms.put(number, name, plain_tensor(value, name, lambda: file.path))
        self._values.append(values)

    def read(self, reads: ReadThreads) -> None:
        """Read what is still to be read, while the files are open."""
        reads.run(self._waiting, self._num_bytes)
        self._waiting, self._num_bytes = [], 0

    def loaded(self) -> Loaded:
        return self._rooms.loaded(self._values)


class _OpenFile(NamedTuple):
    descriptor: int
    path: str


@contextmanager
def _opened(path: str) -> Iterator[_OpenFile]:
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        raise CacheNotFoundError(f"{path} is absent, but the cache's metadata lists it") from None
    except OSError as error:
        raise CacheFileError(f"{path} cannot be read: {error.strerror}") from None
    try:
        yield _OpenFile(descriptor, path)
    finally:
        os.close(descriptor)


def _read_into(buffer: npt.NDArray[np.uint8], file: _OpenFile, offset: int) -> None:
    waiting = buffer.data
    while len(waiting):
        try:
            count = os.preadv(file.descriptor, [waiting], offset)
        except OSError as error:
            raise CacheFileError(f"{file.path} cannot be read: {error.strerror}") from None
        if count == 0:
            raise CacheFileError(f"{file.path} is truncated or damaged: it ends before its tensors do")
        waiting, offset = waiting[count:], offset + count


class PackedSamples:
    """Samples of a packed cache; ``row_numbers`` are those of some of them, or None for all.

    A row's checksum is looked at the first time this process reads it: what the disk has spoilt is found, and
    the epochs after that cost nothing more.
    """

    def __init__(
        self, cache_dir: Path, index: PackedIndex, row_numbers: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._index = index
        self._row_numbers = row_numbers
        self._shards = OpenShards(cache_dir)
        self._checked = {part: np.zeros(len(index) // 8 + 1, np.uint8) for part in index.parts}

    def some(self, rows: Sequence[int]) -> PackedSamples:
        """Only these of the cache's samples."""
        return PackedSamples(self._shards.cache_dir, self._index, np.array(rows, dtype=np.int64))

    def name(self, row: int) -> str:
        """What the sample's file is called, where it has or had one."""
        return self._index.entry(self._row(row)).name

    def _row(self, row: int) -> int:
        return row if self._row_numbers is None else int(self._row_numbers[row])

    def describe(self, row: int) -> str:
        place = self._index.location(self._row(row), "latents")
        return f"{self._shards.path(place.file)}, row {place.row}"

    def file(self, row: int) -> str:
        return self._index.relative_file(self._row(row))

    def files(self, row: int) -> list[str]:
        return [place.file for place in self._index.entry(self._row(row)).locations.values()]

    def load(self, row: int) -> Dictionary:
        row = self._row(row)
        entry = self._index.entry(row)
        names = frozenset[str]().union(*(names_of(place.tensors) for place in entry.locations.values()))
        rooms = self._read([row], [entry], names, BufferPool(), ReadThreads(1))
        return entry.dictionary(self._index.row(row), rooms.of(0))

    def load_many(
        self, rows: Sequence[int], names: Collection[str], memory: BufferPool, reads: ReadThreads
    ) -> Loaded:
        rows = [self._row(row) for row in rows]
        entries = [self._index.entry(row) for row in rows]
        rooms = self._read(rows, entries, names, memory, reads)
        values = [
            entry.dictionary(self._index.row(row), {}) for entry, row in zip(entries, rows, strict=True)
        ]
        return rooms.loaded(values)

    def _read(
        self,
        rows: Sequence[int],
        entries: Sequence[PackedEntry],
        names: Collection[str],
        memory: BufferPool,
        reads: ReadThreads,
    ) -> BatchBuffers:
        """These of the rows' tensors, with all that lies in one run with them."""
        rooms = BatchBuffers(len(rows), memory)
        waiting: list[Callable[[], None]] = []
        num_bytes = 0
        for part in sorted({part_of(name) for name in names}.intersection(self._index.parts)):
            for i, entry in enumerate(entries):
                place = entry.locations.get(part)
                if place is not None:
                    buffers = row_buffers(i, place, names, rooms)
                    waiting.append(partial(self._fill, rows[i], part, place, buffers))
                    num_bytes += place.num_bytes
        reads.run(waiting, num_bytes)
        return rooms

    def _fill(self, row: int, part: str, place: RowLocation, buffers: Sequence[Any]) -> None:
        checked, bit = self._checked[part], 1 << (row & 7)
        self._shards.fill(place, buffers, check=not checked[row >> 3] & bit)
        checked[row >> 3] |= bit  # where two threads meet here, a row is checked once more


def row_buffers(i: int, place: RowLocation, names: Collection[str], rooms: BatchBuffers) -> list[Any]:
    """What a whole row is to be read into: the room of each tensor that is wanted, and something for the others."""
    buffers: list[Any] = []
    for layout in place.tensors:
        size = layout.num_bytes
        if layout.name not in names:
            buffers.append(bytearray(size))
            continue
        buffer = rooms.buffer(i, layout.name, layout.torch_dtype, layout.shape)
        if size < len(buffer):
            buffer[size:] = 0
            buffer = buffer[:size]
        buffers.append(buffer)
    return buffers


class _File:
    """An open file, closed when nobody uses it any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor = open_regular(path)
        self.size = os.fstat(self.descriptor).st_size

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class OpenShards:
    """The shards of a cache, opened as they are needed; the last few stay open. For any number of threads."""

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, file: str) -> Path:
        return self.cache_dir / file

    def check(self, place: RowLocation) -> None:
        """An error if the row is not what was written."""
        self.fill(place, [bytearray(place.num_bytes)])

    def fill(self, place: RowLocation, buffers: Sequence[Any], *, check: bool = True) -> None:
        """Read a row into these buffers, one after the other."""
        file = self._file(place.file)
        if place.offset + place.num_bytes > file.size:
            raise CacheFileError(f"{self._where(place)}: the file ends before the row does; it was cut short")
        waiting = [buffer for buffer in buffers if len(buffer)]
        position = place.offset
        while waiting:
            try:
                count = os.preadv(file.descriptor, waiting, position)
            except OSError as error:
                raise CacheFileError(f"{self._where(place)}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise CacheFileError(
                    f"{self._where(place)}: the file ends before the row does; it was cut short"
                )
            position += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if count:
                waiting[0] = memoryview(waiting[0])[count:]
        if check and checksum(buffers) != place.checksum:
            raise CacheFileError(
                f"{self._where(place)}: its bytes are not those that were written: the checksum differs; the "
                "command that made the cache encodes it again with --verify"
            )

    def _where(self, place: RowLocation) -> str:
        return f"{self.path(place.file)}, row {place.row}"

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
