"""From files of their own to shards and back: the same samples in another form, and nothing lost on the way.

The new cache is written beside the old one, task by task; stopped anywhere, the same command goes on. There and
back again gives the same files, byte for byte, where Latentry wrote them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latentry.buckets import aspect_name
from latentry.cache.format import (
    METADATA_NAME,
    OUTPUT_FORMATS,
    PACKED,
    TASK_SIZE,
    MetadataRows,
    file_name,
    recipe_fingerprint,
)
from latentry.cache.index import open_index
from latentry.cache.packed.index import PackedIndex
from latentry.cache.packed.shards import CONTAINER_DTYPES, USUAL_SHARD_BYTES
from latentry.cache.read.samples import Samples, open_samples
from latentry.cache.write.workspace import Workspace
from latentry.cache.write.writers import Threads, task_writer
from latentry.errors import CacheFileError, ConfigError, RunError
from latentry.storage import content_digest
from latentry.types import Commit

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
    old.check_names(output_format)
    plan = {"converted": {"source": old.signature, "output_format": output_format}}
    with Workspace.opened(output) as workspace:
        _check_target(workspace, plan, source)
        workspace.begin(plan, overwrite=False)
        numbered: list[tuple[int, Row]] = []
        with Threads.running(_WRITER_THREADS) as threads:
            for task_id, bucket, numbers in old.tasks(output_format):
                if not workspace.holds(task_id):
                    writer = task_writer(output, output_format, bucket, task_id, threads)
                    for number in numbers:
                        writer.add(*old.sample(number, output_format))
                    writer.finish()
                    workspace.commit(Commit(task_id, tuple(writer.rows()), ()))
                orders = [old.order(number) for number in numbers]
                numbered += zip(orders, workspace.committed([task_id]), strict=True)
                on_progress(len(numbered), len(old))
        rows = [row for _, row in sorted(numbered, key=lambda pair: pair[0])]
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
        self.signature = f"{self._index.fingerprint} {content_digest(cache_dir / METADATA_NAME)}"
        shard_size = self._metadata.get("shard_size")
        self.shard_size = shard_size if isinstance(shard_size, int) and shard_size > 0 else 10_000
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
                text = f"{self.signature} {output_format} {shape} {start} {size}"
                task_id = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
                yield task_id, (shape.width, shape.height), part

    def check_names(self, output_format: str) -> None:
        """An error if two samples would get the same file."""
        seen: dict[tuple[str, str], str] = {}
        for number in range(len(self) if output_format != PACKED else 0):
            name = self._name(number)
            place = (self._index.shape(number).folder, Path(name).stem)
            if seen.setdefault(place, name) != name:
                raise ConfigError(
                    f"{'/'.join(place)} would be the file of two samples, {seen[place]} and {name}; rename one, or "
                    "convert to packed"
                )

    def sample(self, number: int, output_format: str) -> tuple[str, Row, Row]:
        """Its name, its row without what is said of where it is stored, and its dictionary."""
        row = self._index.row(number) if isinstance(self._index, PackedIndex) else self._row(number)
        kept = {key: value for key, value in row.items() if key not in _PLACED}
        kept.setdefault("bucket_resolution", row.get("bucket_resolution") or row.get("crop_resolution"))
        data = self._samples.load(number)
        for key, value in data.items():
            if problem := _problem(key, value, output_format):
                raise CacheFileError(
                    f"{self._samples.describe(number)}: {key} is {problem}, which {output_format} cannot hold"
                )
        if not isinstance(data.get("latent", data.get("video_latents")), torch.Tensor):
            raise CacheFileError(f"{self._samples.describe(number)} has neither latent nor video_latents")
        return self._name(number), {"cache_file": "", **kept}, data

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


def _problem(key: Any, value: Any, output_format: str) -> str | None:
    """What is wrong with an entry of a sample's dictionary; anything odd would be lost or changed on the way."""
    as_pickle = output_format in ("pt", "meta")
    if type(key) is not str:
        return f"under a key that is no text ({key!r})"
    if isinstance(value, torch.Tensor):
        known = as_pickle or value.dtype in CONTAINER_DTYPES.values()
        plain = value.layout == torch.strided and not value.is_neg() and not value.is_conj()
        return None if known and plain else f"a tensor of {value.dtype}, {value.layout}"
    return None if _is_plain(value, depth=8 if as_pickle else 1) else f"{value!r}"[:80]


def _is_plain(value: Any, depth: int) -> bool:
    """CaptionBatches, numbers, truth values, None, and lists or tuples of them, so many deep."""
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, str):
        return value.encode(errors="replace").decode() == value
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int))


def _latent_bytes(data: Row) -> int:
    latents = data.get("latent", data.get("video_latents"))
    return int(latents.nbytes) if isinstance(latents, torch.Tensor) and latents.numel() else 1
