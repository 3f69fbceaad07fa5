"""The index of a packed cache: for every sample where its tensors lie, and its row, in one Arrow file.

Rows stand grouped by bucket, in blocks of at most ``BLOCK_ROWS``. The file is memory-mapped and a block is
looked at when one of its rows is asked for, so a hundred million rows open at once, take next to no memory of
their own, and are shared by all processes of a machine. What the file says is checked as it is used: a
damaged index raises an error, it does not end the process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from latentry.cache.format import METADATA_NAME, GlobalMetadata, LazyRows
from latentry.cache.packed.shards import RowLocation, TensorLayout, names_of
from latentry.errors import CacheNotFoundError, MetadataError
from latentry.storage import path_inside, publish
from latentry.types import BucketShape

INDEX_VERSION = 2
BLOCK_ROWS = 1 << 16
_BLOCKS_KEPT = 512
_PLAIN_VALUES = msgspec.json.Decoder(dict[str, Any])

PARTS = ("latents", "text", "frames")
"""What is stored apart: what every sample has for itself, what samples of one caption share, what training
does not read."""
_LATENTS = frozenset({"latent", "video_latents", "image_embeds"})
_FRAMES = frozenset({"first_frame"})


def part_of(tensor_name: str) -> str:
    """The part of a sample that a tensor belongs to."""
    if tensor_name in _LATENTS:
        return "latents"
    return "frames" if tensor_name in _FRAMES else "text"


class Form(msgspec.Struct, frozen=True):
    """How a sample's dictionary is put together again."""

    keys: tuple[str, ...]
    tuples: tuple[str, ...]
    """The keys whose values are tuples, which JSON cannot say."""


class Entry(msgspec.Struct, frozen=True):
    """One sample of a packed cache."""

    name: str
    """What its cache file is called where samples have files of their own."""
    places: dict[str, RowLocation]
    form: Form
    values: dict[str, Any]
    """The plain values of its dictionary that its row does not have."""

    def dictionary(self, row: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The sample as a cache file would hold it, without the tensors that are not given."""
        data = {}
        stored = frozenset[str]().union(*(names_of(place.tensors) for place in self.places.values()))
        for key in self.form.keys:
            if key in stored:
                if key in tensors:
                    data[key] = tensors[key]
                continue
            value = self.values[key] if key in self.values else row.get(key)
            if key in self.form.tuples:
                if not isinstance(value, list):
                    raise MetadataError(
                        f"the index is damaged: {key} of {self.name} is {value!r}, not a pair"
                    )
                value = tuple(value)
            data[key] = value
        return data


class _Bucket(msgspec.Struct):
    width: int
    height: int
    aspect_name: str
    num_frames: int | None
    count: int


class Header(msgspec.Struct):
    """What ``metadata.json`` says of the index, under ``packed``."""

    version: int
    index: str
    """The index file's name."""
    fingerprint: str
    block_rows: int
    """Rows in each of a bucket's blocks, except its last."""
    parts: list[str]
    buckets: list[_Bucket]
    layouts: list[tuple[TensorLayout, ...]]
    forms: list[Form]


def index_schema(parts: Sequence[str]) -> Any:
    """The columns: for each part five, then what is left of the row."""
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


# ---- writing --------------------------------------------------------------------------------


def write_index(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    groups: Sequence[tuple[BucketShape, Iterable[int]]],
    fingerprint: str,
) -> Header:
    """Publish the index of these rows, each with its ``packed`` entry, grouped as given."""
    entries = [msgspec.convert(row["packed"], Entry) for row in rows]
    parts = [part for part in PARTS if any(part in entry.places for entry in entries)]
    layouts: dict[tuple[TensorLayout, ...], int] = {}
    forms: dict[Form, int] = {}
    buckets = []
    schema = index_schema(parts)

    def block(numbers: Sequence[int]) -> Any:
        columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        for number in numbers:
            entry = entries[number]
            for part in parts:
                place = entry.places.get(part) or RowLocation("", 0, 0, (), 0)
                columns[f"{part}_file"].append(place.file)
                columns[f"{part}_row"].append(place.row)
                columns[f"{part}_offset"].append(place.offset)
                columns[f"{part}_layout"].append(layouts.setdefault(place.tensors, len(layouts)))
                columns[f"{part}_checksum"].append(place.checksum)
            columns["number"].append(number)
            columns["form"].append(forms.setdefault(entry.form, len(forms)))
            columns["name"].append(entry.name)
            columns["values"].append(msgspec.json.encode(entry.values).decode())
            row = {key: value for key, value in rows[number].items() if key not in ("packed", "cache_file")}
            columns["row"].append(msgspec.json.encode(row).decode())
        return pa.record_batch(columns, schema=schema)

    with publish(path) as draft, pa.ipc.new_file(str(draft), schema) as writer:
        for shape, group in groups:
            numbers = [int(number) for number in group]
            for start in range(0, len(numbers), BLOCK_ROWS):
                writer.write_batch(block(numbers[start : start + BLOCK_ROWS]))
            buckets.append(
                _Bucket(shape.width, shape.height, shape.aspect_name, shape.num_frames, len(numbers))
            )
    return Header(
        INDEX_VERSION, path.name, fingerprint, BLOCK_ROWS, parts, buckets, list(layouts), list(forms)
    )


# ---- reading --------------------------------------------------------------------------------


class PackedIndex:
    """Which samples a packed cache has, and where. Row numbers go through the buckets one after the other."""

    def __init__(self, cache_dir: Path, metadata: GlobalMetadata) -> None:
        self.metadata = metadata
        self._cache_dir = cache_dir
        self._header = _header(cache_dir, metadata)
        self.shapes = tuple(
            BucketShape(b.width, b.height, b.aspect_name, b.num_frames) for b in self._header.buckets
        )
        counts = [bucket.count for bucket in self._header.buckets]
        self._ends = list(accumulate(counts))
        self._block_rows = self._header.block_rows
        self._first_blocks = [0, *accumulate(-(-count // self._block_rows) for count in counts)]
        self.path = path_inside(cache_dir, self._header.index)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
            fits = self._reader.schema.equals(index_schema(self._header.parts))
            fits = fits and self._reader.num_record_batches == self._first_blocks[-1]
        except FileNotFoundError:
            raise CacheNotFoundError(f"{self.path} is absent, but {METADATA_NAME} names it") from None
        except (OSError, pa.ArrowException) as error:
            raise MetadataError(f"{self.path} is damaged: {error}") from None
        if not fits:
            raise MetadataError(f"{self.path} is not the index that {METADATA_NAME} describes")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def fingerprint(self) -> str:
        """The same as that of the same samples in files of their own, in the same order."""
        return self._header.fingerprint

    @property
    def parts(self) -> Sequence[str]:
        return self._header.parts

    def shape(self, row: int) -> BucketShape:
        return self.shapes[bisect_right(self._ends, row)]

    def rows_by_shape(self) -> list[range]:
        """For each shape its row numbers, ascending."""
        return [range(start, end) for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def relative_file(self, row: int) -> str:
        """The shard that holds the sample's latents."""
        block, i = self._find(row)
        return block.text("latents_file", i)

    def place(self, row: int, part: str) -> RowLocation:
        block, i = self._find(row)
        return self._place(block, i, part)

    def _place(self, block: _Block, i: int, part: str) -> RowLocation:
        file, row, offset, layout, checksum = block.place(part, i)
        if layout >= len(self._header.layouts):
            raise MetadataError(f"{self.path} is damaged: there is no layout {layout}")
        return RowLocation(file, row, offset, self._header.layouts[layout], checksum)

    def entry(self, row: int) -> Entry:
        block, i = self._find(row)
        form = block.number("form", i)
        if form >= len(self._header.forms):
            raise MetadataError(f"{self.path} is damaged: there is no form {form}")
        places = {}
        for part in self._header.parts:
            place = self._place(block, i, part)
            if place.tensors:
                places[part] = place
        return Entry(block.text("name", i), places, self._header.forms[form], block.json("values", i))

    def number(self, row: int) -> int:
        """Where the sample stood before the rows were grouped."""
        block, i = self._find(row)
        return block.number("number", i)

    def row(self, row: int) -> dict[str, Any]:
        """The sample's metadata."""
        block, i = self._find(row)
        return block.json("row", i)

    def _find(self, row: int) -> tuple[_Block, int]:
        bucket = bisect_right(self._ends, row)
        inside_bucket = row - (self._ends[bucket - 1] if bucket else 0)
        number = self._first_blocks[bucket] + inside_bucket // self._block_rows
        block = self._blocks.get(number)
        if block is None:
            try:
                block = _Block(self._reader.get_batch(number), self.path)
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
    """Some rows as plain arrays over the mapped file; text is cut out only within its bounds."""

    def __init__(self, batch: Any, path: Path) -> None:
        batch.validate()
        self.num_rows = batch.num_rows
        self._path = path
        self._numbers: dict[str, npt.NDArray[Any]] = {}
        self._texts: dict[str, tuple[npt.NDArray[np.int32], memoryview]] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if column.null_count:
                raise ValueError(f"{name} has gaps")
            if pa.types.is_string(column.type):
                _, offsets, characters = column.buffers()
                ends = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
                self._texts[name] = (ends, memoryview(characters) if characters else memoryview(b""))
            else:
                self._numbers[name] = column.to_numpy()
        self._places = {
            part: tuple(self._numbers[f"{part}_{what}"] for what in ("row", "offset", "layout", "checksum"))
            for part in PARTS
            if f"{part}_row" in self._numbers
        }

    def number(self, column: str, i: int) -> int:
        return int(self._numbers[column][i])

    def place(self, part: str, i: int) -> tuple[str, int, int, int, int]:
        """File, row, offset, layout and checksum."""
        row, offset, layout, checksum = self._places[part]
        return (
            self.text(f"{part}_file", i), row.item(i), offset.item(i), layout.item(i), checksum.item(i),
        )  # fmt: skip

    def text(self, column: str, i: int) -> str:
        return self._bytes(column, i).decode(errors="replace")

    def json(self, column: str, i: int) -> dict[str, Any]:
        try:
            return _PLAIN_VALUES.decode(self._bytes(column, i))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MetadataError(f"{self._path} is damaged: {error}") from None

    def _bytes(self, column: str, i: int) -> bytes:
        ends, characters = self._texts[column]
        start, end = ends.item(i), ends.item(i + 1)
        if not 0 <= start <= end <= len(characters):
            raise MetadataError(f"{self._path} is damaged: a text in column {column} has no bounds")
        return bytes(characters[start:end])


def _header(cache_dir: Path, metadata: GlobalMetadata) -> Header:
    path = cache_dir / METADATA_NAME
    version = (metadata.packed or {}).get("version")
    if version != INDEX_VERSION:
        raise MetadataError(f"{path}: the index is of version {version}, not {INDEX_VERSION}")
    try:
        header = msgspec.convert(metadata.packed, Header)
        for layout in {layout for layouts in header.layouts for layout in layouts}:
            layout.check()
        if any(len(names_of(layouts)) != len(layouts) for layouts in header.layouts):
            raise ValueError("a row would have two tensors of one name")
        if any(min(b.width, b.height, b.count) < 1 for b in header.buckets) or header.block_rows < 1:
            raise ValueError("a bucket has no size")
        if "latents" not in header.parts or not set(header.parts) <= set(PARTS):
            raise ValueError(f"its parts are {header.parts}")
    except ValueError as error:
        raise MetadataError(f"{path}: what it says of the packed index is damaged: {error}") from None
    return header


class PackedRows(LazyRows):
    """The rows of a packed cache, read from its index."""

    def __init__(self, cache_dir: Path, index: PackedIndex) -> None:
        self._cache_dir = cache_dir
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    def _row(self, position: int) -> dict[str, Any]:
        return {
            **self._index.row(position),
            "cache_file": str(self._cache_dir / self._index.relative_file(position)),
            "packed_row": position,
        }


def committed_rows(index: PackedIndex) -> Iterator[dict[str, Any]]:
    """The rows as a run commits them, each with its ``packed`` entry, in their order before grouping."""
    for row in sorted(range(len(index)), key=index.number):
        entry = index.entry(row)
        yield {
            **index.row(row),
            "cache_file": entry.places["latents"].file,
            "packed": msgspec.to_builtins(entry),
        }


def check_places(cache_dir: Path, entry: Entry, sizes: dict[str, int]) -> bool:
    """Whether the files that an entry names are there and long enough; ``sizes`` remembers what was looked up."""
    for place in entry.places.values():
        if place.file not in sizes:
            path = path_inside(cache_dir, place.file)
            sizes[place.file] = path.stat().st_size if path.is_file() else -1
        if sizes[place.file] < place.offset + place.num_bytes:
            return False
    return True
