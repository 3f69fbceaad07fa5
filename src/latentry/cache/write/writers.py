"""Writing samples, in files of their own or into shards: the same samples always give the same bytes.

``meta`` and ``pt`` are what ``torch.save`` writes, readable with ``torch.load(weights_only=True)`` by this
library and by NeMo AutoModel. ``safetensors`` keeps the tensors as such and the plain values as JSON in
the file's header. ``packed`` is many samples to a file (``shards`` and ``packed`` say how).

A writer takes a task's samples in order and works in threads; its rows are complete when all is on disk.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from latentry.cache.format import PACKED, PLAIN_VALUES_KEY
from latentry.cache.packed.index import Entry, Form, part_of
from latentry.cache.packed.shards import LEAST_SHARD_BYTES, USUAL_SHARD_BYTES, StoredRow, write_shard
from latentry.cache.write.torch_file import torch_file_parts
from latentry.errors import RunError
from latentry.storage import parts_digest, publish, write_parts

_ADDS_WAITING = 64
_NAME_SUFFIXES = ("", *(f"_{again}" for again in range(1, 1000)))

Row = dict[str, Any]


class TaskWriter(Protocol):
    def add(self, name: str, row: Row, data: dict[str, Any]) -> None:
        """Take a sample: its name, its row so far, and its dictionary."""

    def finish(self) -> None:
        """No more samples will come."""

    def done(self) -> bool:
        """Whether everything is on disk, or has failed."""

    def rows(self) -> list[Row]:
        """The rows, complete, in order; waits until they are."""


@dataclass(frozen=True)
class Threads:
    """What writers work in; a context that lets them finish, or drops what waits if there is an error."""

    many: ThreadPoolExecutor
    single: ThreadPoolExecutor

    @classmethod
    @contextmanager
    def running(cls, count: int) -> Iterator[Threads]:
        threads = cls(ThreadPoolExecutor(count), ThreadPoolExecutor(1))
        try:
            yield threads
        except BaseException:
            # What is being written is waited for: nothing may appear in a folder that is no longer locked.
            for pool in (threads.many, threads.single):
                pool.shutdown(cancel_futures=True)
            raise
        threads.many.shutdown()
        threads.single.shutdown()


def task_writer(
    output: Path, output_format: str, bucket: tuple[int, int], stem: str, threads: Threads
) -> TaskWriter:
    """What writes one task, all of one bucket; ``stem`` names its shards."""
    folder = f"{bucket[0]}x{bucket[1]}"
    if output_format == PACKED:
        return PackedWriter(output, folder, stem, threads.single)
    return FileWriter(output / folder, output_format, threads.many)


# ---- files ----------------------------------------------------------------------------------


def cache_file_parts(data: dict[str, Any], output_format: str) -> list[Any]:
    """The file's content, in pieces."""
    if output_format != "safetensors":
        return torch_file_parts(data)
    from safetensors.torch import save

    tensors = {k: v.detach().cpu().contiguous() for k, v in data.items() if isinstance(v, torch.Tensor)}
    plain = {k: v for k, v in data.items() if not isinstance(v, torch.Tensor)}
    return [save(tensors, metadata={PLAIN_VALUES_KEY: json.dumps(plain)})]


class FileWriter:
    """A file for each sample."""

    def __init__(self, folder: Path, output_format: str, pool: Executor) -> None:
        self._folder = folder
        self._format = output_format
        self._pool = pool
        self._futures: list[Future[Row]] = []

    def add(self, name: str, row: Row, data: dict[str, Any]) -> None:
        self._futures.append(self._pool.submit(self._write, name, row, data))
        if len(self._futures) > _ADDS_WAITING:
            self._futures[-_ADDS_WAITING].result()

    def _write(self, name: str, row: Row, data: dict[str, Any]) -> Row:
        path = self._folder / f"{Path(name).stem}.{self._format}"
        parts = cache_file_parts(data, self._format)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with publish(path) as draft:
                write_parts(draft, parts)
        except OSError as error:
            raise _unwritable(path, error) from None
        return {
            **row,
            "cache_file": str(path),
            "file_bytes": sum(len(part) for part in parts),
            "file_digest": parts_digest(parts),
        }

    def finish(self) -> None:
        pass

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def rows(self) -> list[Row]:
        return [future.result() for future in self._futures]


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} cannot be written: {error.strerror}; what is committed is kept, and the same command goes on"
    )


# ---- shards ---------------------------------------------------------------------------------


class PackedWriter:
    """Shards of one task, which is of one bucket; a caption that occurs twice is stored once."""

    def __init__(self, output: Path, folder: str, stem: str, single: Executor) -> None:
        self._output = output
        self._folder = folder
        self._stem = stem
        self._single = single
        self._waiting: deque[Future[None]] = deque()
        self._samples: list[_PackedSample] = []
        self._piles: dict[str, list[StoredRow]] = {}
        self._texts: dict[tuple[Any, ...], StoredRow] = {}
        self._sizes: Counter[str] = Counter()
        self._num_shards: Counter[str] = Counter()
        self._finished = False

    def add(self, name: str, row: Row, data: dict[str, Any]) -> None:
        # One thread, so that shards fill in the order of the samples.
        self._waiting.append(self._single.submit(self._pile_up, name, row, data))
        if len(self._waiting) > _ADDS_WAITING:
            self._waiting.popleft().result()

    def finish(self) -> None:
        self._waiting.append(self._single.submit(self._write_rest))
        self._finished = True

    def done(self) -> bool:
        return self._finished and self._waiting[-1].done()

    def rows(self) -> list[Row]:
        for future in self._waiting:
            future.result()
        return [sample.row() for sample in self._samples]

    def _pile_up(self, name: str, row: Row, data: Mapping[str, Any]) -> None:
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(part_of(key), {})[key] = value
        parts = {}
        for part, values in tensors.items():
            new = StoredRow(values)
            same = (str(data.get("prompt")), new.checksum, *new.layouts)
            parts[part] = self._texts.setdefault(same, new) if part == "text" else new
            if parts[part] is new:
                self._piles.setdefault(part, []).append(new)
                self._sizes[part] += new.num_bytes
                self._write_full(part)
        plain = {key: value for key, value in data.items() if not isinstance(value, torch.Tensor)}
        form = Form(tuple(data), tuple(key for key, value in plain.items() if isinstance(value, tuple)))
        plain = json.loads(json.dumps(plain))
        extra = {key: value for key, value in plain.items() if not _same(row, key, value)}
        self._samples.append(_PackedSample(name, row, parts, form, extra))

    def _write_full(self, part: str) -> None:
        """Write a shard of the usual size once so much is there that the rest will not be too small for one."""
        if self._sizes[part] < USUAL_SHARD_BYTES + LEAST_SHARD_BYTES:
            return
        pile = self._piles[part]
        size = count = 0
        while size < USUAL_SHARD_BYTES:
            size += pile[count].num_bytes
            count += 1
        self._write(part, pile[:count])
        self._piles[part] = pile[count:]
        self._sizes[part] -= size

    def _write_rest(self) -> None:
        for part, pile in self._piles.items():
            if pile:
                self._write(part, pile)
        self._piles.clear()

    def _write(self, part: str, pile: list[StoredRow]) -> None:
        number = self._num_shards[part]
        self._num_shards[part] += 1
        names = (
            f"{self._folder}/{self._stem}{again}-{number}.{part}.safetensors" for again in _NAME_SUFFIXES
        )
        try:
            write_shard(self._output, names, pile)
        except OSError as error:
            raise _unwritable(self._output / self._folder, error) from None


def _same(row: Row, key: str, value: Any) -> bool:
    """Whether the row says just this, down to the kind of number."""
    return key in row and repr(row[key]) == repr(value)


class _PackedSample(NamedTuple):
    """A sample whose parts are on their way to disk."""

    name: str
    base: Row
    parts: dict[str, StoredRow]
    form: Form
    extra: dict[str, Any]

    def row(self) -> Row:
        places = {part: stored.place for part, stored in self.parts.items() if stored.place is not None}
        entry = Entry(self.name, places, self.form, self.extra)
        return {**self.base, "cache_file": places["latents"].file, PACKED: msgspec.to_builtins(entry)}
