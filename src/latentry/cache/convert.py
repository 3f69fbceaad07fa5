"""Converting a cache between one file per sample and packed shards, without loss.

The new cache is written beside the old one, task by task, and an interrupted conversion can be resumed. Converting
there and back gives the same files, byte for byte, where Latentry wrote them.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from latentry.buckets import aspect_name
from latentry.cache.format import (
    METADATA_NAME,
    OUTPUT_FORMATS,
    PACKED,
    TASK_SIZE,
    CacheMetadata,
    Row,
    recipe_fingerprint,
    row_from_dict,
)
from latentry.cache.index import PackedIndex, open_index
from latentry.cache.index.rows import open_rows
from latentry.cache.packed_format import SAFETENSORS_DTYPES
from latentry.cache.read.samples import Samples, open_samples
from latentry.cache.write.commits import Commit
from latentry.cache.write.publishing import read_failures
from latentry.cache.write.sample_data import SampleData
from latentry.cache.write.shards import TARGET_SHARD_BYTES
from latentry.cache.write.task_writer import WriterThreads, task_writer
from latentry.cache.write.workspace import Workspace
from latentry.counted import counted
from latentry.errors import CacheFileError, ConfigError, RunError
from latentry.storage import content_digest
from latentry.types import Bucket

_NUM_WRITER_THREADS = 4
_DEFAULT_SHARD_SIZE = 10_000
_MAX_DEPTH = 8
"""How deep lists in a torch file may be nested."""


@dataclass(frozen=True, kw_only=True)
class ConvertResult:
    """What a conversion wrote."""

    output_dir: Path
    output_format: str
    num_samples: int
    size_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "output_dir": str(self.output_dir),
            "output_format": self.output_format,
            "samples": self.num_samples,
            "size_bytes": self.size_bytes,
        }

    def __str__(self) -> str:
        return (
            f"{counted(self.num_samples, 'sample')} in {self.output_dir} ({self.output_format}, "
            f"{self.size_bytes / 1e6:,.1f} MB)"
        )


def convert_cache(
    cache_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    output_format: str = PACKED,
    *,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> ConvertResult:
    """Write a finished cache again, in another format. The old one is not changed.

    >>> convert_cache("cache", "packed_cache", "packed")

    Args:
        cache_dir: The cache to convert, written by Latentry or by NeMo AutoModel.
        output_dir: The folder of the new cache; created if missing. If a conversion into it was interrupted, the
            same call resumes it.
        output_format: ``packed``, ``meta``, ``pt`` or ``safetensors``.
        on_progress: Called with the number of converted samples and the number of all samples.
    """
    if output_format not in OUTPUT_FORMATS:
        raise ConfigError(
            f"unknown output_format {output_format!r}; choose one of {', '.join(OUTPUT_FORMATS)}"
        )
    source, output = (Path(path).expanduser().absolute() for path in (cache_dir, output_dir))
    if source.resolve() == output.resolve():
        raise ConfigError(f"{output} is the cache itself; convert it into another folder")
    old = _OldCache(source, output_format)
    old.check_names()
    recipe = {"converted": {"source": old.signature, "output_format": output_format}}
    with Workspace.opened(output) as workspace:
        _check_output(workspace, recipe, source, output_format)
        workspace.begin(recipe, overwrite=False)
        numbered: list[tuple[int, Row]] = []
        with WriterThreads.running(_NUM_WRITER_THREADS) as threads:
            for task_id, bucket, numbers in old.tasks():
                if not workspace.is_committed(task_id, len(numbers)):
                    writer = task_writer(output, output_format, bucket, task_id, threads)
                    for number in numbers:
                        writer.add(*old.sample(number))
                    writer.finish()
                    workspace.commit(Commit(task_id, tuple(writer.rows()), ()))
                for number, row in zip(numbers, workspace.committed_rows([task_id]), strict=True):
                    numbered += [
                        (old.position(again), msgspec.structs.replace(row, repeat=repeat))
                        for repeat, again in enumerate(old.repeats_of(number))
                    ]
                on_progress(len(numbered), len(old))
        rows = [row for _, row in sorted(numbered, key=lambda pair: pair[0])]
        workspace.finish(rows, read_failures(source), old.shard_size, old.new_metadata())
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return ConvertResult(
        output_dir=output,
        output_format=output_format,
        num_samples=sum(row.repeat == 0 for row in rows),
        size_bytes=size,
    )


def _check_output(workspace: Workspace, recipe: dict[str, Any], source: Path, output_format: str) -> None:
    unfinished = workspace.unfinished_recipe()
    if unfinished is None and (workspace.folder / METADATA_NAME).exists():
        raise RunError(f"{workspace.folder} already holds a finished cache; choose another output_dir")
    if unfinished is not None and unfinished != recipe:
        raise RunError(
            f"{workspace.folder} holds an unfinished run other than the conversion of {source} to "
            f"{output_format}; choose another output_dir"
        )


class _OldCache:
    """The cache that is converted."""

    def __init__(self, cache_dir: Path, output_format: str) -> None:
        self._output_format = output_format
        self._index = open_index(cache_dir, aspect_name)
        self._samples: Samples = open_samples(cache_dir, self._index)
        self._metadata = self._index.metadata
        self.signature = f"{self._index.fingerprint} {content_digest(cache_dir / METADATA_NAME)}"
        recorded = self._metadata.shard_size
        self.shard_size = recorded if recorded and recorded > 0 else _DEFAULT_SHARD_SIZE
        self._rows = open_rows(cache_dir, self._index)
        self._repeats = _repeats(self._rows)
        self._repeated = {number for numbers in self._repeats.values() for number in numbers[1:]}

    def __len__(self) -> int:
        return len(self._index)

    def tasks(self) -> Iterator[tuple[str, Bucket, list[int]]]:
        """(task id, bucket, row numbers): rows of one bucket, as many as fill a shard, each sample once."""
        groups: Sequence[Iterable[int]] = self._index.rows_by_bucket()
        for key, numbers in zip(self._index.bucket_keys, groups, strict=True):
            rows = [int(number) for number in numbers if int(number) not in self._repeated]
            size = TASK_SIZE
            if self._output_format == PACKED:
                size = max(1, TARGET_SHARD_BYTES // _latent_bytes(self._samples.load(rows[0])))
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                text = f"{self.signature} {self._output_format} {key.identity} {start} {size}"
                task_id = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
                yield task_id, key.bucket, part

    def repeats_of(self, number: int) -> Sequence[int]:
        """All rows of the sample with this row, which is the first of them."""
        return self._repeats.get(number, (number,))

    def check_names(self) -> None:
        """Raise an error if two samples would get the same file."""
        if self._output_format == PACKED:
            return
        seen: dict[tuple[str, str], str] = {}
        for number in range(len(self)):
            name = self._name(number)
            file = name if isinstance(self._index, PackedIndex) else self._index.relative_file(number)
            new_file = (self._index.bucket(number).folder, Path(name).stem)
            if seen.setdefault(new_file, file) != file:
                raise ConfigError(
                    f"{'/'.join(new_file)} would be the file of two samples, {seen[new_file]} and {file}; rename "
                    "one, or convert to packed"
                )

    def sample(self, number: int) -> tuple[str, Row, SampleData]:
        """A sample's name, its row without storage fields, and its dictionary."""
        data = self._samples.load(number)
        for key, value in data.items():
            if problem := _problem(key, value, self._output_format):
                raise CacheFileError(
                    f"{self._samples.describe(number)}: {key} is {problem}, which {self._output_format} cannot store"
                )
        if not isinstance(data.get("latent", data.get("video_latents")), torch.Tensor):
            raise CacheFileError(f"{self._samples.describe(number)} has neither latent nor video_latents")
        return self._name(number), self._row(number), data

    def _row(self, number: int) -> Row:
        written = {key: value for key, value in self._rows[number].items() if key != "packed_row"}
        row = row_from_dict({**written, "cache_file": ""})
        return msgspec.structs.replace(
            row, bucket_resolution=row.bucket.resolution, file_bytes=None, file_digest=""
        )

    def _name(self, number: int) -> str:
        if isinstance(self._index, PackedIndex):
            return self._index.entry(number).name
        return self._index.name(number)

    def position(self, number: int) -> int:
        """The sample's position in the order of rows."""
        return self._index.number(number) if isinstance(self._index, PackedIndex) else number

    def new_metadata(self) -> CacheMetadata:
        """The new cache's metadata. Its recipe is the one that would have made it directly."""
        metadata = self._metadata
        if metadata.recipe is not None:
            recipe = {**metadata.recipe, "output_format": self._output_format}
            metadata = msgspec.structs.replace(
                metadata, recipe=recipe, fingerprint=recipe_fingerprint(recipe)
            )
        return metadata


def _repeats(rows: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """First row to all rows of a sample, in order, for samples that an epoch has several times."""
    repeated = {row.get("sample_name") for row in rows if row.get("repeat")}
    if not repeated:
        return {}
    first: dict[Any, int] = {}
    found: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        name = row.get("sample_name")
        if name in repeated:
            found.setdefault(first.setdefault(name, number), []).append(number)
    return found


def _problem(key: Any, value: Any, output_format: str) -> str | None:
    """Why an entry of a sample's dictionary cannot be stored unchanged; None if it can."""
    as_torch_file = output_format in ("pt", "meta")
    if type(key) is not str:
        return f"under a key that is not text ({key!r})"
    if isinstance(value, torch.Tensor):
        known = as_torch_file or value.dtype in SAFETENSORS_DTYPES.values()
        plain = value.layout == torch.strided and not value.is_neg() and not value.is_conj()
        return None if known and plain else f"a tensor of {value.dtype}, {value.layout}"
    return None if _is_plain(value, depth=_MAX_DEPTH if as_torch_file else 1) else f"{value!r}"[:80]


def _is_plain(value: Any, depth: int) -> bool:
    """Whether the value is text, a number, a boolean, None, or a list or tuple of these, nested up to ``depth``."""
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, str):
        return value.encode(errors="replace").decode() == value
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int))


def _latent_bytes(data: SampleData) -> int:
    latents = data.get("latent", data.get("video_latents"))
    return int(latents.nbytes) if isinstance(latents, torch.Tensor) and latents.numel() else 1
