"""Writing the index of a packed cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from latentry.cache.format import Row
from latentry.cache.packed_format import (
    CAPTIONS_VERSION,
    PACKED_VERSION,
    DictForm,
    PackedBucket,
    PackedEntry,
    PackedHeader,
    RowLocation,
    TensorLayout,
    caption_of_part,
    in_order,
    index_schema,
)
from latentry.storage import publish
from latentry.types import BucketKey

BLOCK_ROWS = 1 << 16
_NOWHERE = RowLocation("", 0, 0, (), 0)


def write_packed_index(
    path: Path, rows: Sequence[Row], groups: Sequence[tuple[BucketKey, Iterable[int]]], fingerprint: str
) -> PackedHeader:
    """Publish the index of packed rows, grouped by bucket, and return its description."""
    entries = [_entry(row) for row in rows]
    parts = tuple(in_order({part for entry in entries for part in entry.locations}))
    layouts: dict[tuple[TensorLayout, ...], int] = {}
    forms: dict[DictForm, int] = {}
    buckets = []
    schema = index_schema(parts)

    def block(numbers: Sequence[int]) -> Any:
        columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        for number in numbers:
            entry = entries[number]
            for part in parts:
                location = entry.locations.get(part, _NOWHERE)
                columns[f"{part}_file"].append(location.file)
                columns[f"{part}_row"].append(location.row)
                columns[f"{part}_offset"].append(location.offset)
                columns[f"{part}_layout"].append(layouts.setdefault(location.tensors, len(layouts)))
                columns[f"{part}_checksum"].append(location.checksum)
            columns["number"].append(number)
            columns["form"].append(forms.setdefault(entry.form, len(forms)))
            columns["name"].append(entry.name)
            columns["values"].append(msgspec.json.encode(entry.values).decode())
            row = {key: v for key, v in rows[number].to_dict().items() if key not in ("packed", "cache_file")}
            columns["row"].append(msgspec.json.encode(row).decode())
        return pa.record_batch(columns, schema=schema)

    with publish(path) as draft, pa.ipc.new_file(str(draft), schema) as writer:
        for key, group in groups:
            numbers = [int(number) for number in group]
            for start in range(0, len(numbers), BLOCK_ROWS):
                writer.write_batch(block(numbers[start : start + BLOCK_ROWS]))
            buckets.append(PackedBucket(key.width, key.height, key.aspect_name, key.num_frames, len(numbers)))
    return PackedHeader(
        version=CAPTIONS_VERSION if any(map(caption_of_part, parts)) else PACKED_VERSION,
        index=path.name,
        fingerprint=fingerprint,
        block_rows=BLOCK_ROWS,
        parts=parts,
        buckets=tuple(buckets),
        layouts=tuple(layouts),
        forms=tuple(forms),
    )


def _entry(row: Row) -> PackedEntry:
    assert row.packed is not None, f"{row.sample_name} is not packed"
    return row.packed
