"""The index of a packed cache: where each sample's tensors are, and its row, in one Arrow file.

Rows are grouped by bucket, in blocks of a fixed number of rows. The file is memory-mapped, and a block is decoded
when one of its rows is asked for. So a hundred million rows open in milliseconds, take almost no memory, and are
shared by all processes of a machine. The content is checked as it is used: a damaged index raises an error instead
of crashing the process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from latentry.cache.format import METADATA_NAME, CacheMetadata, Row, row_from_dict
from latentry.cache.packed_format import PackedEntry, RowLocation, index_schema
from latentry.errors import CacheNotFoundError, MetadataError
from latentry.storage import path_inside
from latentry.types import Bucket, BucketKey

_BLOCKS_KEPT = 512
_JSON_OBJECT = msgspec.json.Decoder(dict[str, Any])


class PackedIndex:
    """The samples of a packed cache. Row numbers count through the buckets, one after the other."""

    def __init__(self, cache_dir: Path, metadata: CacheMetadata) -> None:
        assert metadata.packed is not None, "the cache is not packed"
        self.metadata = metadata
        self._header = header = metadata.packed
        self.bucket_keys = tuple(
            BucketKey(b.width, b.height, b.aspect_name, b.num_frames) for b in header.buckets
        )
        counts = [bucket.count for bucket in header.buckets]
        self._ends = list(accumulate(counts))
        self._block_rows = header.block_rows
        self._first_blocks = [0, *accumulate(-(-count // self._block_rows) for count in counts)]
        self.path = path_inside(cache_dir, header.index)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
            fits = self._reader.schema.equals(index_schema(header.parts))
            fits = fits and self._reader.num_record_batches == self._first_blocks[-1]
        except FileNotFoundError:
            raise CacheNotFoundError(f"{self.path} is missing, but {METADATA_NAME} names it") from None
        except (OSError, pa.ArrowException) as error:
            raise MetadataError(f"{self.path} is damaged: {error}") from None
        if not fits:
            raise MetadataError(f"{self.path} is not the index that {METADATA_NAME} describes")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def fingerprint(self) -> str:
        """Equal to the fingerprint of the same samples with one file each, in the same order."""
        return self._header.fingerprint

    @property
    def parts(self) -> Sequence[str]:
        return self._header.parts

    def bucket(self, row: int) -> Bucket:
        return self.bucket_keys[bisect_right(self._ends, row)].bucket

    def rows_by_bucket(self) -> list[range]:
        """The row numbers of each bucket, ascending."""
        return [range(start, end) for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def relative_file(self, row: int) -> str:
        """The shard that holds the sample's latents."""
        block, i = self._find(row)
        return block.text("latents_file", i)

    def location(self, row: int, part: str) -> RowLocation:
        """Where one part of a sample is."""
        block, i = self._find(row)
        return self._location(block, i, part)

    def _location(self, block: _Block, i: int, part: str) -> RowLocation:
        file, row, offset, layout, checksum = block.location(part, i)
        if layout >= len(self._header.layouts):
            raise MetadataError(f"{self.path} is damaged: there is no layout {layout}")
        return RowLocation(file, row, offset, self._header.layouts[layout], checksum)

    def entry(self, row: int) -> PackedEntry:
        """Everything needed to load a sample, besides its row."""
        block, i = self._find(row)
        form = block.number("form", i)
        if form >= len(self._header.forms):
            raise MetadataError(f"{self.path} is damaged: there is no form {form}")
        locations = {}
        for part in self._header.parts:
            location = self._location(block, i, part)
            if location.tensors:
                locations[part] = location
        return PackedEntry(
            block.text("name", i), locations, self._header.forms[form], block.json("values", i)
        )

    def number(self, row: int) -> int:
        """The sample's position in the order of rows before they were grouped by bucket."""
        block, i = self._find(row)
        return block.number("number", i)

    def row(self, row: int) -> dict[str, Any]:
        """The sample's row as it is written, without the fields that say where the sample is stored."""
        block, i = self._find(row)
        return block.json("row", i)

    def typed_rows(self) -> Iterator[Row]:
        """All rows, complete, in their order before they were grouped by bucket."""
        for number in sorted(range(len(self)), key=self.number):
            entry = self.entry(number)
            data = {**self.row(number), "cache_file": entry.locations["latents"].file}
            try:
                row = row_from_dict(data)
            except msgspec.ValidationError as error:
                raise MetadataError(f"{self.path}, row {number}: {error}") from None
            row.packed = entry
            yield row

    def _find(self, row: int) -> tuple[_Block, int]:
        bucket = bisect_right(self._ends, row)
        inside_bucket = row - (self._ends[bucket - 1] if bucket else 0)
        number = self._first_blocks[bucket] + inside_bucket // self._block_rows
        block = self._blocks.get(number)
        if block is None:
            try:
                block = _Block(self._reader.get_batch(number), self.path, self._header.parts)
            except (OSError, pa.ArrowException, ValueError) as error:
                raise MetadataError(f"{self.path} is damaged: {error}") from None
            self._blocks[number] = block
            while len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        i = inside_bucket % self._block_rows
        if i >= block.num_rows:
            raise MetadataError(f"{self.path} is damaged: block {number} has only {block.num_rows} rows")
        return block, i


class _Block:
    """A block of rows as plain arrays over the mapped file. Text is read only within its bounds."""

    def __init__(self, batch: Any, path: Path, parts: Sequence[str]) -> None:
        batch.validate()
        self.num_rows = batch.num_rows
        self._path = path
        self._numbers: dict[str, npt.NDArray[Any]] = {}
        self._texts: dict[str, tuple[npt.NDArray[np.int32], memoryview]] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if column.null_count:
                raise ValueError(f"column {name} has missing values")
            if pa.types.is_string(column.type):
                _, offsets, characters = column.buffers()
                ends = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
                self._texts[name] = (ends, memoryview(characters) if characters else memoryview(b""))
            else:
                self._numbers[name] = column.to_numpy()
        self._locations = {
            part: tuple(self._numbers[f"{part}_{what}"] for what in ("row", "offset", "layout", "checksum"))
            for part in parts
        }

    def number(self, column: str, i: int) -> int:
        return int(self._numbers[column][i])

    def location(self, part: str, i: int) -> tuple[str, int, int, int, int]:
        """File, row, offset, layout and checksum."""
        row, offset, layout, checksum = self._locations[part]
        return (
            self.text(f"{part}_file", i), row.item(i), offset.item(i), layout.item(i), checksum.item(i),
        )  # fmt: skip

    def text(self, column: str, i: int) -> str:
        return self._bytes(column, i).decode(errors="replace")

    def json(self, column: str, i: int) -> dict[str, Any]:
        try:
            return _JSON_OBJECT.decode(self._bytes(column, i))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MetadataError(f"{self._path} is damaged: {error}") from None

    def _bytes(self, column: str, i: int) -> bytes:
        ends, characters = self._texts[column]
        start, end = ends.item(i), ends.item(i + 1)
        if not 0 <= start <= end <= len(characters):
            raise MetadataError(f"{self._path} is damaged: a text in column {column} is out of bounds")
        return bytes(characters[start:end])
