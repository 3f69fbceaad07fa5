"""Writing shards: many samples' tensors in one immutable safetensors file.

Trailing zeros of a tensor (the padding of a caption) are not stored; readers restore them, so nothing is lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from latentry.cache.packed_format import (
    ALIGNMENT,
    SAFETENSORS_DTYPES,
    RowLocation,
    TensorLayout,
    checksum,
)
from latentry.storage import file_has_content, publish, write_parts

MIN_SHARD_BYTES = 1 << 28
TARGET_SHARD_BYTES = 1 << 29
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class ShardRow:
    """A shard row that waits to be written: a copy of its tensors' bytes.

    Tensors whose sizes are multiples of the alignment come first, so that the ones after them stay aligned.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.location: RowLocation | None = None
        """Where the shard row is stored; None until it is written."""
        trimmed = [_trimmed(name, tensor) for name, tensor in tensors.items()]
        trimmed.sort(key=lambda pair: -math.gcd(len(pair[1]), ALIGNMENT))
        self.layouts = [layout for layout, _ in trimmed]
        self.contents = [content for _, content in trimmed]
        self.checksum = checksum(self.contents)
        self.num_bytes = sum(len(content) for content in self.contents)

    @classmethod
    def stored(cls, location: RowLocation, contents: Sequence[memoryview]) -> ShardRow:
        """A shard row that was read from a shard."""
        row = cls({})
        row.location = location
        row.layouts, row.contents = list(location.tensors), list(contents)
        row.checksum, row.num_bytes = location.checksum, location.num_bytes
        return row


def _trimmed(name: str, tensor: torch.Tensor) -> tuple[TensorLayout, memoryview]:
    """The tensor's layout and bytes, without trailing zero positions."""
    if tensor.dtype not in _DTYPE_NAMES:
        raise TypeError(f"{name} is {tensor.dtype}, which safetensors cannot store")
    values = tensor.detach().cpu().contiguous()
    raw = values.reshape(-1).view(torch.uint8).numpy() if values.numel() else np.empty(0, np.uint8)
    kept = None
    if values.ndim == 3 and values.shape[0] == 1 and values.numel():
        used = np.flatnonzero(raw.reshape(values.shape[1], -1).any(axis=1))
        length = int(used[-1]) + 1 if len(used) else 0
        if length < values.shape[1]:
            kept = length
            raw = raw.reshape(values.shape[1], -1)[:length].reshape(-1)
    layout = TensorLayout(name, _DTYPE_NAMES[tensor.dtype], tuple(values.shape), kept)
    return layout, memoryview(raw.copy())


def write_shard(output: Path, names: Iterable[str], rows: Sequence[ShardRow]) -> None:
    """Publish the shard rows as one file, under the first free name, and set their locations.

    A file with the same content is reused. A file with other content is never overwritten: the finished cache may
    still need it.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    starts = []
    paddings = []

    def add(name: str, dtype: str, shape: Sequence[int], size: int) -> None:
        nonlocal position
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size

    for number, row in enumerate(rows):
        starts.append(position)
        for layout in row.layouts:
            add(f"{number}.{layout.name}", layout.dtype, layout.stored_shape, layout.num_bytes)
        gap = -position % ALIGNMENT
        if gap:
            add(f"padding.{number}", "U8", [gap], gap)
        paddings.append(bytes(gap))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    contents = (
        part for row, padding in zip(rows, paddings, strict=True) for part in (*row.contents, padding)
    )
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
        row.location = RowLocation(relative, number, base + start, tuple(row.layouts), row.checksum)
