"""From files of their own to shards and back: the same samples in another form, and nothing lost on the way.

The new cache is written beside the old one, task by task; stopped anywhere, the same command goes on. There and
back again gives the same files, byte for byte, where Latentry wrote them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latentry.buckets import aspect_name
from latentry.cache.index import open_index
from latentry.cache.metadata import METADATA_NAME, MetadataRows, file_name
from latentry.cache.packed import PackedIndex
from latentry.cache.samples import Samples, open_samples
from latentry.cache.shards import USUAL_SHARD_BYTES
from latentry.cache.workspace import Workspace
from latentry.cache.writer import PACKED, Threads, task_writer
from latentry.errors import ConfigError, RunError
from latentry.plan import OUTPUT_FORMATS, TASK_SIZE, recipe_fingerprint
from latentry.records import Commit

Row = dict[str, Any]
_WRITER_THREADS = 4
_PLACED = ("cache_file", "file_bytes", "file_digest", "packed_row")
"""What a row says of where its sample is stored."""


@dataclass(frozen=True, kw_only=True)
class ConvertResult:
    output_dir: Path
    output_format: str
    num_samples: int
    size_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.num_samples} samples in {self.output_dir} ({self.output_format}, "
            f"{self.size_bytes / 1e6:,.1f} MB)"
        )


def convert_cache(
    cache_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    output_format: str = PACKED,
    *,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> ConvertResult:
    """Write a finished cache of any kind anew, in another form.

    >>> convert_cache("cache", "packed_cache", "packed")
    """
    if output_format not in OUTPUT_FORMATS:
        raise ConfigError(
            f"unknown output_format {output_format!r}; choose one of {', '.join(OUTPUT_FORMATS)}"
        )
    source, output = (Path(path).expanduser().absolute() for path in (cache_dir, output_dir))
    if source.resolve() == output.resolve():
        raise ConfigError(f"{output} is the cache itself; convert it into another folder")
    old = _Source(source)
    plan = {"converted": {"fingerprint": old.fingerprint, "output_format": output_format}}
    with Workspace.opened(output) as workspace:
        _check_target(workspace, plan, source)
        workspace.begin(plan, overwrite=False)
        rows: list[Row] = []
        with Threads.running(_WRITER_THREADS) as threads:
            for task_id, bucket, numbers in old.tasks(output_format):
                if not workspace.is_committed(task_id):
                    writer = task_writer(output, output_format, bucket, task_id, threads)
                    for number in numbers:
                        writer.add(*old.sample(number))
                    writer.finish()
                    workspace.commit(Commit(task_id, tuple(writer.rows()), ()))
                for number, row in zip(numbers, workspace.committed([task_id]), strict=True):
                    rows.append({**row, "number": old.order(number)})
                on_progress(len(rows), len(old))
        rows.sort(key=lambda row: row["number"])
        for row in rows:
            del row["number"]
        workspace.finish(rows, (), old.shard_size, old.header(output_format))
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return ConvertResult(
        output_dir=output, output_format=output_format, num_samples=len(rows), size_bytes=size
    )


def _check_target(workspace: Workspace, plan: Row, source: Path) -> None:
    begun = workspace.begun()
    if begun is None and (workspace.folder / METADATA_NAME).exists():
        raise RunError(f"{workspace.folder} holds a finished cache already; choose another output_dir")
    if begun is not None and begun != plan:
        raise RunError(
            f"{workspace.folder} holds something else than {source} on its way to {plan['converted']['output_format']}; "
            "choose another output_dir"
        )


class _Source:
    """The cache that is converted."""

    def __init__(self, cache_dir: Path) -> None:
        self._index = open_index(cache_dir, aspect_name)
        self._samples: Samples = open_samples(cache_dir, self._index)
        self._metadata: Row = json.loads((cache_dir / METADATA_NAME).read_text(encoding="utf-8"))
        self.fingerprint = self._index.fingerprint
        self.shard_size = int(self._metadata.get("shard_size") or 10_000)
        self._rows: MetadataRows | None = None
        if not isinstance(self._index, PackedIndex):
            self._rows = MetadataRows(cache_dir, self._index.metadata.shards, self._index.shard_lengths)

    def __len__(self) -> int:
        return len(self._index)

    def tasks(self, output_format: str) -> Iterator[tuple[str, tuple[int, int], list[int]]]:
        """Rows of one bucket at a time, as many as go into a shard, each such group with a name."""
        groups: Sequence[Iterable[int]] = self._index.rows_by_shape()
        for shape, numbers in zip(self._index.shapes, groups, strict=True):
            rows = [int(number) for number in numbers]
            size = TASK_SIZE
            if output_format == PACKED:
                size = max(1, USUAL_SHARD_BYTES // _latent_bytes(self._samples.load(rows[0])))
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                text = f"{self.fingerprint} {output_format} {shape} {start} {size}"
                task_id = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
                yield task_id, (shape.width, shape.height), part

    def sample(self, number: int) -> tuple[str, Row, Row]:
        """Its name, its row without what is said of where it is stored, and its dictionary."""
        row = self._index.row(number) if isinstance(self._index, PackedIndex) else self._row(number)
        kept = {key: value for key, value in row.items() if key not in _PLACED}
        kept.setdefault("bucket_resolution", row.get("bucket_resolution") or row.get("crop_resolution"))
        return self._name(number), {"cache_file": "", **kept}, self._samples.load(number)

    def _row(self, number: int) -> Row:
        assert self._rows is not None
        return self._rows[number]

    def _name(self, number: int) -> str:
        if isinstance(self._index, PackedIndex):
            return self._index.entry(number).name
        return file_name(self._index.relative_file(number))

    def order(self, number: int) -> int:
        """Where the sample stands in the order of rows."""
        return self._index.number(number) if isinstance(self._index, PackedIndex) else number

    def header(self, output_format: str) -> Row:
        """What ``metadata.json`` keeps of the old one; the recipe is the one that would make the new one."""
        left_out = ("total_items", "num_shards", "shard_size", "shards", "format_version", PACKED)
        header = {key: value for key, value in self._metadata.items() if key not in left_out}
        if isinstance(header.get("recipe"), dict):
            header["recipe"] = {**header["recipe"], "output_format": output_format}
            header["fingerprint"] = recipe_fingerprint(header["recipe"])
        return header


def _latent_bytes(data: Row) -> int:
    latents = data.get("latent", data.get("video_latents"))
    return int(latents.nbytes) if isinstance(latents, torch.Tensor) and latents.numel() else 1
