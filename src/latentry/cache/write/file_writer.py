"""One file per sample.

``meta`` and ``pt`` files are what ``torch.save`` writes; Latentry and NeMo AutoModel read them with
``torch.load(weights_only=True)``. ``safetensors`` files store the plain values as JSON in their header.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from latentry.cache.format import PLAIN_VALUES_KEY, Row
from latentry.cache.write.sample_data import SampleData
from latentry.cache.write.torch_file import torch_file_parts
from latentry.errors import RunError
from latentry.storage import parts_digest, publish, write_parts

MAX_QUEUED = 64
"""Samples that wait to be written before ``add`` blocks."""


def cache_file_parts(data: SampleData, output_format: str) -> list[Any]:
    """The file's content, as consecutive buffers."""
    if output_format != "safetensors":
        return torch_file_parts(data)
    from safetensors.torch import save

    tensors = {k: v.detach().cpu().contiguous() for k, v in data.items() if isinstance(v, torch.Tensor)}
    plain = {k: v for k, v in data.items() if not isinstance(v, torch.Tensor)}
    return [save(tensors, metadata={PLAIN_VALUES_KEY: json.dumps(plain)})]


class FileWriter:
    """Writes one file per sample into a bucket's folder."""

    def __init__(self, folder: Path, output_format: str, pool: Executor) -> None:
        self._folder = folder
        self._format = output_format
        self._pool = pool
        self._stored: list[Row] = []
        self._futures: list[Future[Row]] = []

    def restore(self, rows: Sequence[Row]) -> None:
        self._stored = list(rows)

    def add(self, name: str, row: Row, data: SampleData) -> None:
        self._futures.append(self._pool.submit(self._write, name, row, data))
        if len(self._futures) > MAX_QUEUED:
            self._futures[-MAX_QUEUED].result()

    def _write(self, name: str, row: Row, data: SampleData) -> Row:
        path = self._folder / f"{Path(name).stem}.{self._format}"
        parts = cache_file_parts(data, self._format)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with publish(path) as draft:
                write_parts(draft, parts)
        except OSError as error:
            raise cannot_write(path, error) from None
        return msgspec.structs.replace(
            row,
            cache_file=str(path),
            file_bytes=sum(len(part) for part in parts),
            file_digest=parts_digest(parts),
        )

    def finish(self) -> None:
        pass

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def store(self) -> PendingRows:
        return PendingRows(self._stored, tuple(self._futures))

    def rows(self) -> list[Row]:
        return self.store().result()


class PendingRows(NamedTuple):
    """The rows of samples whose files are being written."""

    stored: Sequence[Row]
    futures: Sequence[Future[Row]]

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def result(self) -> list[Row]:
        return [*self.stored, *(future.result() for future in self.futures)]


def cannot_write(path: Path, error: OSError) -> RunError:
    """The error for a file that cannot be written."""
    return RunError(
        f"cannot write {path}: {error.strerror}; committed samples are kept: fix the cause, then rerun the same "
        "command to resume"
    )
