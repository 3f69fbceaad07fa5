"""The shards of one task."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from latentry.cache.caption_keys import PROMPTS, split_caption_key
from latentry.cache.format import Row
from latentry.cache.packed_format import DictForm, PackedEntry, caption_of_part, part_of
from latentry.cache.write.file_writer import MAX_QUEUED, cannot_write
from latentry.cache.write.sample_data import SampleData
from latentry.cache.write.shards import MIN_SHARD_BYTES, TARGET_SHARD_BYTES, ShardRow, write_shard

_NAME_SUFFIXES = ("", *(f"_{number}" for number in range(1, 1000)))


class PackedWriter:
    """Writes the shards of one task. A caption that occurs twice is stored once."""

    def __init__(self, output: Path, folder: str, stem: str, single: Executor) -> None:
        self._output = output
        self._folder = folder
        self._stem = stem
        self._single = single
        self._queued: deque[Future[None]] = deque()
        self._samples: list[_PackedSample] = []
        self._unwritten: dict[str, list[ShardRow]] = {}
        self._unwritten_bytes: Counter[str] = Counter()
        self._captions: dict[tuple[Any, ...], ShardRow] = {}
        self._num_shards: Counter[str] = Counter()
        self._finished = False

    def add(self, name: str, row: Row, data: SampleData) -> None:
        # A single thread, so that shards are filled in the order of the samples.
        self._queued.append(self._single.submit(self._collect, name, row, data))
        if len(self._queued) > MAX_QUEUED:
            self._queued.popleft().result()

    def finish(self) -> None:
        self._queued.append(self._single.submit(self._write_rest))
        self._finished = True

    def done(self) -> bool:
        return self._finished and self._queued[-1].done()

    def rows(self) -> list[Row]:
        for future in self._queued:
            future.result()
        return [sample.row() for sample in self._samples]

    def _collect(self, name: str, row: Row, data: SampleData) -> None:
        """Assign a sample's tensors to shards, and write every shard that is full."""
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(part_of(key), {})[split_caption_key(key)[0]] = value
        prompts = data.get(PROMPTS) or [data.get("prompt")]
        parts = {}
        for part, values in tensors.items():
            new = ShardRow(values)
            shard, number = "text" if caption_of_part(part) else part, caption_of_part(part)
            if shard == "text":
                prompt = prompts[number] if number < len(prompts) else None
                parts[part] = self._captions.setdefault((str(prompt), new.checksum, *new.layouts), new)
            else:
                parts[part] = new
            if parts[part] is new:
                self._unwritten.setdefault(shard, []).append(new)
                self._unwritten_bytes[shard] += new.num_bytes
                self._write_full_shard(shard)
        plain = {key: value for key, value in data.items() if not isinstance(value, torch.Tensor)}
        form = DictForm(tuple(data), tuple(key for key, value in plain.items() if isinstance(value, tuple)))
        plain = json.loads(json.dumps(plain))
        known = row.to_dict()
        extra = {key: value for key, value in plain.items() if not _is_same(known, key, value)}
        self._samples.append(_PackedSample(name, row, parts, form, extra))

    def _write_full_shard(self, part: str) -> None:
        """Write a shard of the target size, if the rest is large enough for another one."""
        if self._unwritten_bytes[part] < TARGET_SHARD_BYTES + MIN_SHARD_BYTES:
            return
        rows = self._unwritten[part]
        size = count = 0
        while size < TARGET_SHARD_BYTES:
            size += rows[count].num_bytes
            count += 1
        self._write(part, rows[:count])
        self._unwritten[part] = rows[count:]
        self._unwritten_bytes[part] -= size

    def _write_rest(self) -> None:
        for part, rows in self._unwritten.items():
            if rows:
                self._write(part, rows)
        self._unwritten.clear()

    def _write(self, part: str, rows: list[ShardRow]) -> None:
        number = self._num_shards[part]
        self._num_shards[part] += 1
        names = (
            f"{self._folder}/{self._stem}{suffix}-{number}.{part}.safetensors" for suffix in _NAME_SUFFIXES
        )
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
