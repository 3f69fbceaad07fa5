"""The shards of one task.

A shard is written when it is full, and a task may take long to fill one. So ``store`` writes what waits for its shard
to a temporary shard first. A resumed run reads it back and fills the same shards. If the task no longer exists, the
temporary shards stay: they are shards like any other.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from latentry.cache.caption_keys import PROMPTS, split_caption_key
from latentry.cache.format import Row
from latentry.cache.packed_format import DictForm, PackedEntry, caption_of_part, part_of
from latentry.cache.read.shard_files import OpenShards
from latentry.cache.write.file_writer import MAX_QUEUED, cannot_write
from latentry.cache.write.sample_data import SampleData
from latentry.cache.write.shards import MIN_SHARD_BYTES, TARGET_SHARD_BYTES, ShardRow, write_shard

ResultT = TypeVar("ResultT")
_NAME_SUFFIXES = ("", *(f"_{number}" for number in range(1, 1000)))


class PackedWriter:
    """Writes the shards of one task. A caption that occurs twice is stored once."""

    def __init__(self, output: Path, folder: str, stem: str, single: Executor) -> None:
        self._output = output
        self._folder = folder
        self._stem = stem
        self._single = single
        self._queued: deque[Future[Any]] = deque()
        self._samples: list[_PackedSample] = []
        self._unwritten: dict[str, list[ShardRow]] = {}
        self._unwritten_bytes: Counter[str] = Counter()
        self._captions: dict[tuple[Any, ...], ShardRow] = {}
        self._num_shards: Counter[str] = Counter()
        self._temporary_stem = hashlib.blake2b(f"{stem} temporary".encode(), digest_size=16).hexdigest()
        self._num_temporary_shards = 0
        self._finished = False
        self._error: BaseException | None = None

    def restore(self, rows: Sequence[Row]) -> None:
        self._queued.append(self._submit(self._read_back, tuple(rows)))

    def add(self, name: str, row: Row, data: SampleData) -> None:
        self._queued.append(self._submit(self._collect, name, row, data))
        if len(self._queued) > MAX_QUEUED:
            self._queued.popleft().result()

    def store(self) -> Future[list[Row]]:
        return self._submit(self._store)

    def finish(self) -> None:
        self._queued.append(self._submit(self._write_rest))
        self._finished = True

    def done(self) -> bool:
        return self._finished and self._queued[-1].done()

    def rows(self) -> list[Row]:
        for future in self._queued:
            future.result()
        return [sample.row() for sample in self._samples]

    def _submit(self, call: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]:
        """Run a call in a single thread, so that shards are filled in the order of the samples."""
        return self._single.submit(self._run, call, *arguments)

    def _run(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Run a call. After an error, every later call raises it too: samples are missing then."""
        if self._error is not None:
            raise self._error
        try:
            return call(*arguments)
        except BaseException as error:
            self._error = error
            raise

    def _collect(self, name: str, row: Row, data: SampleData) -> None:
        """Assign a sample's tensors to shards, and write every shard that is full."""
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(part_of(key), {})[split_caption_key(key)[0]] = value
        prompts = data.get(PROMPTS) or (data.get("prompt"),)
        parts = {}
        for part, values in tensors.items():
            parts[part] = self._assign(part, ShardRow(values), prompts)
        plain = {key: value for key, value in data.items() if not isinstance(value, torch.Tensor)}
        form = DictForm(tuple(data), tuple(key for key, value in plain.items() if isinstance(value, tuple)))
        plain = json.loads(json.dumps(plain))
        known = row.to_dict()
        extra = {key: value for key, value in plain.items() if not _is_same(known, key, value)}
        self._samples.append(_PackedSample(name, row, parts, form, extra))

    def _assign(self, part: str, new: ShardRow, prompts: Sequence[str | None]) -> ShardRow:
        """Put a shard row into the next shard of its part, unless it is a caption that is already there."""
        caption = caption_of_part(part)
        if part == "text" or caption:
            part = "text"
            prompt = prompts[caption] if caption < len(prompts) else None
            identity = (str(prompt), new.checksum, *new.layouts)
            known = self._captions.setdefault(identity, new)
            if known is not new:
                return known
        self._unwritten.setdefault(part, []).append(new)
        self._unwritten_bytes[part] += new.num_bytes
        self._write_full_shard(part)
        return new

    def _read_back(self, rows: Sequence[Row]) -> None:
        """Assign the stored samples to shards, as if they had just been encoded.

        Samples that share a caption share its shard row. Other shard rows are not shared, although equal samples may
        have the same location: a temporary shard with the same content as an earlier one is not written again.
        """
        shards = OpenShards(self._output)
        captions: dict[tuple[str, int, str | None], ShardRow] = {}
        for row in rows:
            assert row.packed is not None, f"{row.sample_name} is not packed"
            prompts = row.prompts or (row.prompt,)
            parts = {}
            for part, location in row.packed.locations.items():
                number = caption_of_part(part)
                is_caption = part == "text" or number > 0
                key = (location.file, location.row, prompts[number] if number < len(prompts) else None)
                if is_caption and key in captions:
                    parts[part] = captions[key]
                    continue
                contents = [memoryview(bytearray(layout.num_bytes)) for layout in location.tensors]
                shards.fill(location, contents)
                parts[part] = self._assign(part, ShardRow.stored(location, contents), prompts)
                if is_caption:
                    captions[key] = parts[part]
            base = msgspec.structs.replace(row, cache_file="", packed=None)
            entry = row.packed
            self._samples.append(_PackedSample(entry.name, base, parts, entry.form, entry.values))

    def _store(self) -> list[Row]:
        """Write everything that no shard holds yet to temporary shards. It stays in memory too."""
        number, self._num_temporary_shards = self._num_temporary_shards, self._num_temporary_shards + 1
        for part, waiting in self._unwritten.items():
            if rows := [row for row in waiting if row.location is None]:
                self._write(self._temporary_stem, number, part, rows)
        return [sample.row() for sample in self._samples]

    def _write_full_shard(self, part: str) -> None:
        """Write a shard of the target size, if the rest is large enough for another one."""
        if self._unwritten_bytes[part] < TARGET_SHARD_BYTES + MIN_SHARD_BYTES:
            return
        rows = self._unwritten[part]
        size = count = 0
        while size < TARGET_SHARD_BYTES:
            size += rows[count].num_bytes
            count += 1
        self._write_shard(part, rows[:count])
        self._unwritten[part] = rows[count:]
        self._unwritten_bytes[part] -= size

    def _write_rest(self) -> None:
        for part, rows in self._unwritten.items():
            if rows:
                self._write_shard(part, rows)
        self._unwritten.clear()

    def _write_shard(self, part: str, rows: list[ShardRow]) -> None:
        """Write the next shard of a part, and release its bytes."""
        number = self._num_shards[part]
        self._num_shards[part] += 1
        self._write(self._stem, number, part, rows)
        for row in rows:
            row.contents = []

    def _write(self, stem: str, number: int, part: str, rows: list[ShardRow]) -> None:
        names = (f"{self._folder}/{stem}{suffix}-{number}.{part}.safetensors" for suffix in _NAME_SUFFIXES)
        try:
            write_shard(self._output, names, rows)
        except OSError as error:
            raise cannot_write(self._output / self._folder, error) from None


def _is_same(row: Mapping[str, Any], key: str, value: Any) -> bool:
    """Whether the row has exactly this value, including the type of numbers."""
    return key in row and repr(row[key]) == repr(value)


class _PackedSample(NamedTuple):
    """A sample whose shards are being written."""

    name: str
    base: Row
    parts: dict[str, ShardRow]
    form: DictForm
    values: dict[str, Any]

    def row(self) -> Row:
        locations = {part: row.location for part, row in self.parts.items() if row.location is not None}
        return msgspec.structs.replace(
            self.base,
            cache_file=locations["latents"].file,
            packed=PackedEntry(self.name, locations, self.form, self.values),
        )
