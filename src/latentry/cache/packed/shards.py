"""Shards: many samples' tensors in one immutable file, in the safetensors container.

A row is a run of tensors without gaps between them, named ``17.latent`` and so on, so that one read fetches
them all and any tool can open them. Each row has a checksum. Positions that hold nothing but zeros at the end
of a tensor (a caption's padding) are left out and filled in again on reading: nothing is lost.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from latentry.cache.format import ALIGNMENT
from latentry.storage import file_has_content, publish, write_parts

LEAST_SHARD_BYTES = 1 << 28
USUAL_SHARD_BYTES = 1 << 29

CONTAINER_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""By the container's names."""
_NAMES = {dtype: name for name, dtype in CONTAINER_DTYPES.items()}


class TensorLayout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """How one tensor is stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """As a reader gets it."""
    kept: int | None = None
    """How many positions of its second-to-last dimension are stored, the others being zero; None for all."""

    @functools.cached_property
    def torch_dtype(self) -> torch.dtype:
        return CONTAINER_DTYPES[self.dtype]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape if self.kept is None else (*self.shape[:-2], self.kept, self.shape[-1])

    @functools.cached_property
    def num_bytes(self) -> int:
        return math.prod(self.stored_shape) * self.torch_dtype.itemsize

    def check(self) -> None:
        """A ``ValueError`` if no tensor can be stored like this."""
        if self.dtype not in CONTAINER_DTYPES or len(self.shape) > 16:
            raise ValueError(f"{self.name} is no tensor")
        if not all(0 <= side < 1 << 31 for side in self.shape) or math.prod(self.shape) >= 1 << 40:
            raise ValueError(f"{self.name} cannot have the shape {self.shape}")
        if self.kept is not None and (len(self.shape) < 2 or not 0 <= self.kept <= self.shape[-2]):
            raise ValueError(f"{self.name} cannot have {self.kept} positions")


@functools.lru_cache(maxsize=1 << 10)
def names_of(layouts: tuple[TensorLayout, ...]) -> frozenset[str]:
    """What the tensors are called."""
    return frozenset(layout.name for layout in layouts)


@functools.lru_cache(maxsize=1 << 10)
def _num_bytes(layouts: tuple[TensorLayout, ...]) -> int:
    return sum(layout.num_bytes for layout in layouts)


class RowLocation(msgspec.Struct, frozen=True):
    """Where a row is, and what must be found there."""

    file: str
    """Relative to the cache."""
    row: int
    offset: int
    """In bytes, of the row's first tensor in the file."""
    tensors: tuple[TensorLayout, ...]
    checksum: int

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.tensors)


def checksum(parts: Iterable[Any]) -> int:
    """XXH3 of some buffers one after the other: a hash that keeps up with the disk."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


class StoredRow:
    """A row on its way to a shard: a copy of its tensors' bytes, those first whose sizes keep the next aligned."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.place: RowLocation | None = None
        """Where it is, once it is written; its bytes are let go then."""
        trimmed = [_trimmed(name, tensor) for name, tensor in tensors.items()]
        trimmed.sort(key=lambda pair: -math.gcd(len(pair[1]), ALIGNMENT))
        self.layouts = [layout for layout, _ in trimmed]
        self.contents = [content for _, content in trimmed]
        self.checksum = checksum(self.contents)
        self.num_bytes = sum(len(content) for content in self.contents)


def _trimmed(name: str, tensor: torch.Tensor) -> tuple[TensorLayout, memoryview]:
    if tensor.dtype not in _NAMES:
        raise TypeError(f"{name} is {tensor.dtype}, which the safetensors container has no name for")
    values = tensor.detach().cpu().contiguous()
    raw = values.reshape(-1).view(torch.uint8).numpy() if values.numel() else np.empty(0, np.uint8)
    kept = None
    if values.ndim == 3 and values.shape[0] == 1 and values.numel():
        used = np.flatnonzero(raw.reshape(values.shape[1], -1).any(axis=1))
        length = int(used[-1]) + 1 if len(used) else 0
        if length < values.shape[1]:
            kept = length
            raw = raw.reshape(values.shape[1], -1)[:length].reshape(-1)
    return TensorLayout(name, _NAMES[tensor.dtype], tuple(values.shape), kept), memoryview(raw.copy())


def write_shard(output: Path, names: Iterable[str], rows: Sequence[StoredRow]) -> None:
    """Publish the rows as one file, under the first name that is free, and tell each its place.

    A file that holds the same already is left as it is; one that holds something else is never written over, because
    the cache in force may need it.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    starts = []
    fillers = []

    def enter(name: str, dtype: str, shape: Sequence[int], size: int) -> None:
        nonlocal position
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size

    for number, row in enumerate(rows):
        starts.append(position)
        for layout in row.layouts:
            enter(f"{number}.{layout.name}", layout.dtype, layout.stored_shape, layout.num_bytes)
        gap = -position % ALIGNMENT
        if gap:
            enter(f"padding.{number}", "U8", [gap], gap)
        fillers.append(bytes(gap))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    contents = (part for row, filler in zip(rows, fillers, strict=True) for part in (*row.contents, filler))
    parts = [len(text).to_bytes(8, "little"), text, *contents]
    for relative in names:
        path = output / relative
        if file_has_content(path, parts):
            break
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with publish(path) as draft:
                write_parts(draft, parts)
            break
    base = 8 + len(text)
    for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
        row.place = RowLocation(relative, number, base + start, tuple(row.layouts), row.checksum)
        row.contents = []
