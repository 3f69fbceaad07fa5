"""The files of a cache: their names, the row of a sample, and ``metadata.json``.

Rows and ``metadata.json`` are typed records. Each has one reader and one writer, here. Keys that Latentry does
not know, written by another tool, are kept in ``other`` and written back unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from latentry.cache.locator import FileLocator, split_path
from latentry.cache.packed_format import READABLE_VERSIONS, PackedEntry, PackedHeader
from latentry.errors import CacheNotFoundError, MetadataError
from latentry.storage import path_inside
from latentry.types import Bucket, Window

FORMAT_VERSION = 1
METADATA_NAME = "metadata.json"
FAILURES_NAME = "failures.jsonl"
PACKED = "packed"
OUTPUT_FORMATS = ("meta", "pt", "safetensors", PACKED)
PLAIN_VALUES_KEY = "latentry"
"""The key in a safetensors file's header under which a sample's plain values are stored as JSON."""
TASK_SIZE = 256
"""Samples in a task, where each sample has its own file."""

T = TypeVar("T")
RecordT = TypeVar("RecordT", "Row", "CacheMetadata")
Json = dict[str, Any]
"""A JSON object."""


# ---- rows -----------------------------------------------------------------------------------


class IndexRow(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The fields of a row that finding and grouping samples depends on.

    Decoding only these is several times faster than decoding whole rows.
    """

    cache_file: str
    """Where the file was written; ``FileLocator`` finds it where the cache is now."""
    bucket_resolution: tuple[int, int] | None = None
    crop_resolution: tuple[int, int] | None = None
    """What early image caches call ``bucket_resolution``."""
    aspect_ratio: int | float | None = None
    num_frames: int | None = None


class Row(IndexRow, kw_only=True, omit_defaults=True):
    """One sample's metadata. Rows of other tools lack the ``source_…`` fields."""

    image_path: str | None = None
    video_path: str | None = None
    original_resolution: tuple[int, int] | None = None
    prompt: str | None = None
    """The caption, or the first one."""
    prompts: tuple[str, ...] | None = None
    """All captions, if there are several."""
    bucket_id: int | UnsetType | None = UNSET
    pixels: int | None = None
    model_type: str | None = None
    frame_index: int | None = None
    """In frames mode: the sample's number among those of its video, from 1. Rows that Latentry wrote before version 0.2
    count from 0; ``number`` is right for both."""
    total_frames_extracted: int | None = None
    source_frame_index: int | None = None
    window_index: int | None = None
    """For a part of a video: its number among those of the video, from 0."""
    num_windows: int | None = None
    window_start_s: float | None = None
    """Where the part begins, in seconds after the first frame."""
    window_frames: tuple[int, int] | None = None
    """The first and the last frame of the part, by their numbers in the file."""
    sample_name: str = ""
    """Identifies the sample within its source."""
    repeat: int = 0
    """0, and 1, 2 and so on in further rows of the same sample: an epoch has a sample once per row."""
    caption_source: str = ""
    source_name: str = ""
    """The input file, relative to the source."""
    source_bytes: int | None = None
    source_modified_ns: int | None = None
    """Negative for files dated before 1970."""
    source_digest: str = ""
    damage: str = ""
    """What is wrong with the input, where the user chose to keep damaged ones."""
    file_bytes: int | None = None
    file_digest: str = ""
    packed: PackedEntry | None = None
    """Set where the sample is stored in shards."""
    other: Json = msgspec.field(default_factory=dict)
    """Keys that Latentry does not know."""

    @property
    def bucket(self) -> Bucket:
        """The sample's bucket. Raises ``MetadataError`` if the row has none."""
        found = self.bucket_resolution or self.crop_resolution
        if found is None:
            raise MetadataError(f"the row of {self.cache_file} has no bucket_resolution")
        return Bucket(*found, self.num_frames)

    @property
    def number(self) -> int:
        """The number of this sample among those of its input, from 0."""
        name = self.sample_name
        if (
            name.startswith(f"{self.source_name}#")
            and (number := name[len(self.source_name) + 1 :]).isdecimal()
        ):
            return int(number)
        return max(0, (self.frame_index or 1) - 1)

    @property
    def num_samples(self) -> int:
        """How many samples the input gives."""
        return self.num_windows or self.total_frames_extracted or 1

    @property
    def window(self) -> Window | None:
        """The part of the video that the sample shows; None if it begins with the video."""
        if self.window_frames is None:
            return None
        return Window(self.window_start_s, *self.window_frames, self.num_frames or 1)

    @property
    def media_path(self) -> str | None:
        """The input's path on the machine that encoded it."""
        return self.image_path if self.image_path is not None else self.video_path

    def files(self, locator: FileLocator) -> tuple[str, ...]:
        """The files that hold the sample's data, relative to the cache of the locator."""
        if self.packed is not None:
            return tuple(location.file for location in self.packed.locations.values())
        return (locator.relative_file(*split_path(self.cache_file), self.bucket.folder),)

    def to_dict(self) -> Json:
        """The row as it is written, its keys in the documented order."""
        return _to_dict(self, _ROW_KEYS)


_ROW_KEYS = (
    "cache_file", "image_path", "video_path", "bucket_resolution", "crop_resolution", "original_resolution",
    "num_frames", "prompt", "prompts", "bucket_id", "aspect_ratio", "pixels", "model_type", "frame_index",
    "total_frames_extracted", "source_frame_index", "window_index", "num_windows", "window_start_s", "window_frames",
    "sample_name", "repeat", "caption_source", "source_name", "source_bytes", "source_modified_ns",
    "source_digest", "damage", "file_bytes", "file_digest", "packed",
)  # fmt: skip


def row_from_dict(data: Json) -> Row:
    """The typed row. Raises ``msgspec.ValidationError`` if a field that finding samples depends on is mistyped."""
    return _from_dict(data, Row, _ROW_KEYS)


def read_index_rows(cache_dir: Path, shard: str) -> list[IndexRow]:
    """The rows of one metadata shard, reduced to what an index needs."""
    return _decode(shard_path(cache_dir, shard), msgspec.json.Decoder(list[IndexRow]).decode)


def read_row_dicts(cache_dir: Path, shard: str) -> list[Json]:
    """The rows of one metadata shard as they are written."""
    return _decode(shard_path(cache_dir, shard), msgspec.json.Decoder(list[Json]).decode)


def shard_path(cache_dir: Path, shard: str) -> Path:
    """The path of a metadata shard that ``metadata.json`` lists."""
    path = path_inside(cache_dir, shard)
    if not path.is_file():
        raise CacheNotFoundError(f"{cache_dir / METADATA_NAME} lists {shard}, but that file is missing")
    return path


# ---- metadata.json --------------------------------------------------------------------------


class CacheMetadata(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The content of ``metadata.json``."""

    processor: str | None = None
    model_name: str | None = None
    model_type: str | None = None
    total_items: int | None = None
    num_shards: int | None = None
    shard_size: int | None = None
    shards: list[str]
    """The metadata shards, in order."""
    caption_format: str | None = None
    """Videos only."""
    caption_field: str | UnsetType | None = UNSET
    max_pixels: int | None = None
    mode: str | None = None
    """Videos only."""
    target_frames: int | UnsetType | None = UNSET
    """Videos only; null if the number of frames was not given."""
    recipe: Json | None = None
    """The resolved recipe that made the cache; None for caches of other tools."""
    fingerprint: str | None = None
    """Identifies the recipe."""
    device_memory: int | None = None
    """The memory budget of the last run that encoded something, in bytes; absent if it had none, as on a CPU."""
    format_version: int | None = None
    max_captions: int | None = None
    """The largest number of captions of a sample, if it is more than 1."""
    packed: PackedHeader | None = None
    """Set where samples are stored in shards."""
    other: Json = msgspec.field(default_factory=dict)
    """Keys that Latentry does not know."""

    def to_json(self) -> str:
        """The file's content, its keys in the documented order."""
        return json.dumps(_to_dict(self, _METADATA_KEYS), indent=2)


_METADATA_KEYS = tuple(name for name in CacheMetadata.__struct_fields__ if name != "other")


class _PackedNames(msgspec.Struct):
    version: Any = None
    index: Any = None


class WrittenNames(msgspec.Struct):
    """The little of ``metadata.json`` that every release understands: its version, and which files it uses."""

    format_version: Any = None
    shards: list[Any] = []
    packed: _PackedNames | None = None

    @property
    def files(self) -> set[str]:
        """The metadata shards and the index that the file lists."""
        index = [self.packed.index] if self.packed is not None else []
        return {name for name in [*self.shards, *index] if isinstance(name, str)}


def read_written_names(cache_dir: Path) -> WrittenNames:
    """Read the version and the files of a cache that another release may have written."""
    return _decode(cache_dir / METADATA_NAME, msgspec.json.Decoder(WrittenNames).decode)


def read_metadata(cache_dir: Path) -> CacheMetadata:
    """Read ``metadata.json``; errors say what the folder lacks to be a cache."""
    if not cache_dir.is_dir():
        raise CacheNotFoundError(f"there is no folder {cache_dir}; cache_dir must be a finished cache")
    path = path_inside(cache_dir, METADATA_NAME)
    if not path.is_file():
        raise CacheNotFoundError(
            f"{cache_dir} has no {METADATA_NAME}: it is not a cache, or its preprocessing has not finished"
        )
    metadata = _decode(path, _decode_metadata)
    if not metadata.shards and metadata.packed is None:
        raise MetadataError(f"{path} lists no shards: the cache is empty")
    if metadata.packed is not None:
        try:
            metadata.packed.check()
        except ValueError as error:
            raise MetadataError(f"{path}: the description of the packed index is damaged: {error}") from None
    return metadata


def _decode_metadata(content: bytes) -> CacheMetadata:
    versions = msgspec.json.decode(content, type=WrittenNames)
    if versions.packed is not None and versions.packed.version not in READABLE_VERSIONS:
        readable = " and ".join(map(str, READABLE_VERSIONS))
        raise msgspec.ValidationError(
            f"the packed index has version {versions.packed.version}; this release reads versions {readable}"
        )
    return _from_dict(msgspec.json.decode(content, type=Json), CacheMetadata, _METADATA_KEYS)


CAPTION_CHOICES = {"caption_format": "auto", "caption_field": None}
"""The fields of a recipe that only decide which captions are found, with their default values. A recorded recipe has
them, but they do not count: each row has its captions, and a sample whose captions changed is encoded again."""


def recipe_fingerprint(recipe: Mapping[str, Any]) -> str:
    """Identifies a resolved recipe as it is recorded in a cache. Which captions are found does not count."""
    recipe = {name: CAPTION_CHOICES.get(name, value) for name, value in recipe.items()}
    return hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=16).hexdigest()


# ---- both -----------------------------------------------------------------------------------


def _to_dict(record: Row | CacheMetadata, keys: tuple[str, ...]) -> Json:
    found = msgspec.to_builtins(record)
    known = {key: found[key] for key in keys if key in found}
    known = {key: list(value) if isinstance(value, tuple) else value for key, value in known.items()}
    return {**known, **{key: value for key, value in record.other.items() if key not in known}}


def _from_dict(data: Json, kind: type[RecordT], keys: tuple[str, ...]) -> RecordT:
    """The typed record. Unknown keys, nulls, and values of optional keys that have another type go to ``other``."""
    known = {key: value for key, value in data.items() if key in keys and value is not None}
    try:
        record = msgspec.convert(known, kind)
    except msgspec.ValidationError:
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        known = {key: v for key, v in known.items() if key in _ESSENTIAL or _fits(v, types[key])}
        record = msgspec.convert(known, kind)
    if len(known) < len(data):
        record.other = {key: value for key, value in data.items() if key not in known}
        for key in record.other.keys() & _NULLABLE:
            if record.other[key] is None:
                setattr(record, key, record.other.pop(key))
    return record


_ESSENTIAL = frozenset(IndexRow.__struct_fields__) | {"shards", "total_items", "format_version", "packed"}
"""Keys that finding and reading samples depends on; a wrong type is an error."""
_NULLABLE = frozenset({"bucket_id", "caption_field", "target_frames"})
"""Keys that Latentry itself writes as null."""


def _fits(value: Any, expected: Any) -> bool:
    try:
        msgspec.convert(value, expected)
    except msgspec.ValidationError:
        return False
    return True


def _decode(path: Path, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(path.read_bytes())
    except msgspec.ValidationError as error:
        raise MetadataError(f"{path}: {str(error).replace('`$', '`').replace('`[', '`row [')}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MetadataError(f"{path} is not valid JSON ({error}); it may be truncated") from None
