"""The records of a packed cache: how tensors are stored in shards, and where each sample is.

A shard is a safetensors file with many shard rows. A shard row is what the shard holds of one sample: adjacent tensors,
named ``17.latent`` and so on. One read fetches a shard row, and any safetensors tool can open the file. Every shard row
has a checksum.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import torch
import xxhash

from latentry.cache.caption_keys import caption_key, split_caption_key
from latentry.errors import MetadataError

PACKED_VERSION = 2
"""Version of the index of a packed cache, and of its description in ``metadata.json``."""
CAPTIONS_VERSION = 3
"""The version if samples have several captions. It is the same otherwise."""
READABLE_VERSIONS = (PACKED_VERSION, CAPTIONS_VERSION)
ALIGNMENT = 64
"""Byte alignment of shard rows and of the buffers that batches are read into; ``torch.save`` uses the same. Some CPUs
copy five times slower between addresses whose offsets within a page differ by less than 32."""

PARTS = ("latents", "text", "frames")
"""The parts of a sample that are stored in separate shards: what every sample has for itself, what samples with
the same caption share, and what training does not read."""
_FURTHER_CAPTION = re.compile(r"text_([1-9]\d{0,5})")
"""The part of a further caption. It has its own columns in the index. Its shard rows are in the shards of the part
``text``, with the same tensor names as those of first captions, so that equal captions share one."""
_LATENT_FIELDS = frozenset({"latent", "video_latents", "image_embeds", "audio_latents"})
_FRAME_FIELDS = frozenset({"first_frame"})

SAFETENSORS_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""dtype by its name in the safetensors format."""


def part_of(tensor_name: str) -> str:
    """The part of a sample that a tensor belongs to: ``part_of("first_frame")`` is ``"frames"``."""
    if tensor_name in _LATENT_FIELDS:
        return "latents"
    if tensor_name in _FRAME_FIELDS:
        return "frames"
    return text_part(split_caption_key(tensor_name)[1])


def text_part(caption: int) -> str:
    """The part with the tensors of a caption: ``text`` for the first one, then ``text_1`` and so on."""
    return f"text_{caption}" if caption else "text"


def caption_of_part(part: str) -> int:
    """The number of the caption whose tensors the part has; 0 for parts that all captions share."""
    match = _FURTHER_CAPTION.fullmatch(part)
    return int(match[1]) if match else 0


def in_order(parts: Iterable[str]) -> list[str]:
    """Parts in the order of their columns: as in ``PARTS``, then further captions."""
    return sorted(
        set(parts), key=lambda part: (caption_of_part(part), PARTS.index(part) if part in PARTS else 0)
    )


def checksum(parts: Iterable[Any]) -> int:
    """XXH3 of consecutive buffers: a hash that is faster than a disk."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


class TensorLayout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """How one tensor is stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """The shape that readers get."""
    kept: int | None = None
    """Stored positions of the second-to-last dimension; the remaining ones are zero. None if all are stored."""

    @functools.cached_property
    def torch_dtype(self) -> torch.dtype:
        return SAFETENSORS_DTYPES[self.dtype]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape if self.kept is None else (*self.shape[:-2], self.kept, self.shape[-1])

    @functools.cached_property
    def num_bytes(self) -> int:
        return math.prod(self.stored_shape) * self.torch_dtype.itemsize

    def check(self) -> None:
        """Raise ``ValueError`` if no tensor can be stored like this."""
        if self.dtype not in SAFETENSORS_DTYPES or len(self.shape) > 16:
            raise ValueError(f"{self.name} is not a tensor")
        if not all(0 <= side < 1 << 31 for side in self.shape) or math.prod(self.shape) >= 1 << 40:
            raise ValueError(f"{self.name} cannot have the shape {self.shape}")
        if self.kept is not None and (len(self.shape) < 2 or not 0 <= self.kept <= self.shape[-2]):
            raise ValueError(f"{self.name} cannot have {self.kept} positions")


@functools.lru_cache(maxsize=1 << 10)
def names_of(layouts: tuple[TensorLayout, ...]) -> frozenset[str]:
    """The names of the tensors."""
    return frozenset(layout.name for layout in layouts)


@functools.lru_cache(maxsize=1 << 10)
def _num_bytes(layouts: tuple[TensorLayout, ...]) -> int:
    return sum(layout.num_bytes for layout in layouts)


class RowLocation(msgspec.Struct, frozen=True):
    """Where a shard row is, and what it must contain."""

    file: str
    """The shard, relative to the cache."""
    row: int
    offset: int
    """Byte offset of the shard row's first tensor in the file."""
    tensors: tuple[TensorLayout, ...]
    checksum: int

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.tensors)


class DictForm(msgspec.Struct, frozen=True):
    """How to rebuild a sample's dictionary."""

    keys: tuple[str, ...]
    tuples: tuple[str, ...]
    """The keys whose values are tuples; JSON stores them as lists."""


class PackedEntry(msgspec.Struct, frozen=True):
    """Everything that is needed to load one sample of a packed cache, besides its row."""

    name: str
    """The name of the sample's file in a cache with one file per sample."""
    locations: dict[str, RowLocation] = msgspec.field(name="places")
    """Part to location."""
    form: DictForm
    values: dict[str, Any]
    """The plain values of the sample's dictionary that its row does not have."""

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(
            caption_key(name, caption_of_part(part))
            for part, location in self.locations.items()
            for name in names_of(location.tensors)
        )

    def dictionary(self, row: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The dictionary that the sample's file would hold; tensors that are not given are left out."""
        data = {}
        stored = self.tensor_names
        for key in self.form.keys:
            if key in stored:
                if key in tensors:
                    data[key] = tensors[key]
                continue
            value = self.values[key] if key in self.values else row.get(key)
            if key in self.form.tuples:
                if not isinstance(value, list):
                    raise MetadataError(
                        f"the index is damaged: {key} of {self.name} is {value!r}, not a list"
                    )
                value = tuple(value)
            data[key] = value
        return data


class PackedBucket(msgspec.Struct, frozen=True):
    """One bucket of a packed cache, and its number of samples."""

    width: int
    height: int
    aspect_name: str
    num_frames: int | None
    count: int


class PackedHeader(msgspec.Struct, frozen=True):
    """The description of the index in ``metadata.json``, under ``packed``."""

    version: int
    index: str
    """The index file's name."""
    fingerprint: str
    block_rows: int
    """Rows in each block of a bucket, except its last block."""
    parts: tuple[str, ...]
    buckets: tuple[PackedBucket, ...]
    layouts: tuple[tuple[TensorLayout, ...], ...]
    forms: tuple[DictForm, ...]

    def check(self) -> None:
        """Raise ``ValueError`` if the description contradicts itself."""
        for layout in {layout for layouts in self.layouts for layout in layouts}:
            layout.check()
        if any(len(names_of(layouts)) != len(layouts) for layouts in self.layouts):
            raise ValueError("a row would have two tensors with the same name")
        if any(min(b.width, b.height, b.count) < 1 for b in self.buckets) or self.block_rows < 1:
            raise ValueError("a bucket has no samples, or block_rows is not positive")
        known = set(PARTS) | {part for part in self.parts if caption_of_part(part)}
        if "latents" not in self.parts or not set(self.parts) <= known:
            raise ValueError(f"its parts are {list(self.parts)}")


def index_schema(parts: Sequence[str]) -> Any:
    """The Arrow schema of the index: five columns for each part, then the rest of the row."""
    fields = []
    for part in parts:
        fields += [
            pa.field(f"{part}_file", pa.string(), nullable=False),
            pa.field(f"{part}_row", pa.uint32(), nullable=False),
            pa.field(f"{part}_offset", pa.uint64(), nullable=False),
            pa.field(f"{part}_layout", pa.uint32(), nullable=False),
            pa.field(f"{part}_checksum", pa.uint64(), nullable=False),
        ]
    return pa.schema(
        [
            *fields,
            pa.field("number", pa.uint64(), nullable=False),
            pa.field("form", pa.uint32(), nullable=False),
            pa.field("name", pa.string(), nullable=False),
            pa.field("values", pa.string(), nullable=False),
            pa.field("row", pa.string(), nullable=False),
        ]
    )
