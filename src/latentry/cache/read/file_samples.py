"""Samples of a cache with one file per sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from latentry.cache.caption_keys import drawn_caption, num_captions, one_caption
from latentry.cache.index import CacheIndex
from latentry.cache.index.rows import Rows, stored_row
from latentry.cache.read.batch_buffers import BatchBuffers, plain_tensor
from latentry.cache.read.columns import Columns
from latentry.cache.read.fields import FileFields, with_row_values
from latentry.cache.read.file_contents import read_contents
from latentry.cache.read.files import load_cache_file
from latentry.cache.read.pickle_reader import TensorLocation
from latentry.cache.read.read_threads import ReadThreads
from latentry.cache.read.resources import ReadResources
from latentry.errors import CacheFileError, CacheNotFoundError
from latentry.storage import KnownFolders, open_regular

_MAX_OPEN_FILES = 64


class FileSamples:
    """Reads samples that each have their own file."""

    def __init__(self, cache_dir: Path, index: CacheIndex, rows: Rows) -> None:
        self._cache_dir = cache_dir
        self._index = index
        self._rows = rows
        self._folders = KnownFolders(cache_dir)

    def describe(self, row: int) -> str:
        return str(self._cache_dir / self._index.relative_file(row))

    def file(self, row: int) -> str:
        return self._index.relative_file(row)

    def files(self, row: int) -> list[str]:
        return [self.file(row)]

    def load(self, row: int) -> dict[str, Any]:
        return load_cache_file(self._cache_dir, self._index.relative_file(row))

    def read(
        self,
        rows: Sequence[int],
        fields: FileFields,
        resources: ReadResources | None = None,
        draws: Sequence[int | None] | None = None,
    ) -> Columns:
        resources = resources or ReadResources()
        batch = _FileBatch(len(rows), fields, BatchBuffers(len(rows), resources.buffers))
        for start in range(0, len(rows), _MAX_OPEN_FILES):
            with ExitStack() as open_files:
                for i in range(start, min(start + _MAX_OPEN_FILES, len(rows))):
                    relative = self._index.relative_file(rows[i])
                    file = open_files.enter_context(_opened(self._folders.path_inside(relative)))
                    contents = read_contents(file.descriptor, os.path.splitext(relative)[1])
                    if contents is None:
                        contents = load_cache_file(self._cache_dir, relative)
                    row = stored_row(self._rows, rows[i])
                    contents = with_row_values(contents, row, fields)
                    if self._index.metadata.max_captions and not fields.all_captions:
                        draw = None if draws is None else draws[i]
                        number = drawn_caption(draw, self._index.name(rows[i]), row, num_captions(contents))
                        contents = one_caption(contents, number)
                    batch.add(i, file, contents)
                batch.read_tensors(resources.threads)
        return batch.columns(lambda i: self.describe(rows[i]))


class _FileBatch:
    """A batch that is being read: first the headers of all files are parsed, then all tensors are read."""

    def __init__(self, num_samples: int, fields: FileFields, buffers: BatchBuffers) -> None:
        self._num_samples = num_samples
        self._fields = fields
        self._buffers = buffers
        self._values: dict[str, list[Any]] = {"cache_file": [None] * num_samples}
        self._reads: list[Callable[[], None]] = []
        self._num_bytes = 0

    def add(self, i: int, file: _OpenFile, contents: dict[str, Any]) -> None:
        """Take the fields of sample ``i``. The file must stay open until ``read_tensors`` returns."""
        self._values["cache_file"][i] = file.path
        for name, value in contents.items():
            if name in self._fields.unserved:
                continue
            if isinstance(value, TensorLocation):
                buffer = self._buffers.buffer(i, name, value.dtype, value.shape)
                self._reads.append(partial(_read_into, buffer, file, value.offset))
                self._num_bytes += value.num_bytes
            elif isinstance(value, torch.Tensor) and (
                name in self._fields.names or value.layout == torch.strided
            ):
                self._buffers.put(i, name, plain_tensor(value, name, lambda: file.path))
            else:
                if name not in self._values:
                    self._values[name] = [None] * self._num_samples
                self._values[name][i] = value

    def read_tensors(self, threads: ReadThreads) -> None:
        threads.run(self._reads, self._num_bytes)
        self._reads, self._num_bytes = [], 0

    def columns(self, describe: Callable[[int], str]) -> Columns:
        return Columns(self._num_samples, self._buffers.columns(), self._values, describe)


class _OpenFile(NamedTuple):
    descriptor: int
    path: str


@contextmanager
def _opened(path: str) -> Iterator[_OpenFile]:
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        raise CacheNotFoundError(f"{path} is missing, but the cache's metadata lists it") from None
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
