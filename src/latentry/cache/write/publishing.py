"""Publishing a cache's metadata: a reader sees the old cache or the new one, never a mixture.

New metadata shards and indexes get names that the current ``metadata.json`` does not list. Replacing
``metadata.json`` is the one step that counts.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import msgspec

from latentry.buckets import aspect_name
from latentry.cache.format import (
    FAILURES_NAME,
    FORMAT_VERSION,
    METADATA_NAME,
    CacheMetadata,
    Row,
    read_written_names,
)
from latentry.cache.index.file_index import index_of_rows
from latentry.cache.packed_format import PackedHeader
from latentry.cache.write.commits import write_text
from latentry.cache.write.packed_index import write_packed_index
from latentry.errors import MetadataError, RunError
from latentry.types import Failure

_SUFFIXES = ("", "_b", "_c", "_d")
"""Ends of file names: a name that the current cache uses is not written to."""
_PATTERNS = ("metadata_shard_*.json", "index*.arrow", "packed_index*.arrow")
"""Older releases called the index of a packed cache ``index.arrow``."""


def publish_metadata(
    folder: Path,
    rows: Sequence[Row],
    failures: Sequence[Failure],
    shard_size: int,
    metadata: CacheMetadata,
) -> None:
    """Publish these rows and failures as the cache in the folder.

    Args:
        folder: The cache.
        rows: All rows, in order. Without rows there is no cache, and ``metadata.json`` is removed.
        failures: The inputs that could not be encoded. They are written to ``failures.jsonl`` after ``metadata.json``.
        shard_size: Rows per metadata shard. A packed cache has none.
        metadata: What to record about the run; counts, metadata shards and index are filled in here.
    """
    current = _current_files(folder)
    packed = _publish_index(folder, rows, current) if rows and rows[0].packed is not None else None
    parts = [] if packed else [rows[i : i + shard_size] for i in range(0, len(rows), shard_size)]
    shards = _publish_shards(folder, parts, current)
    if rows:
        max_captions = max(len(row.prompts or ()) for row in rows)
        complete = msgspec.structs.replace(
            metadata,
            total_items=len(rows),
            num_shards=len(shards),
            shard_size=shard_size,
            shards=shards,
            format_version=FORMAT_VERSION,
            max_captions=max_captions if max_captions > 1 else None,
            packed=packed,
        )
        write_text(folder / METADATA_NAME, complete.to_json())
    else:
        (folder / METADATA_NAME).unlink(missing_ok=True)
    write_failures(folder / FAILURES_NAME, failures)
    keep = {*shards, packed.index if packed else ""}
    for pattern in _PATTERNS:
        for path in folder.glob(pattern):
            if path.name not in keep:
                path.unlink()


def _current_files(folder: Path) -> set[str]:
    """The metadata shards and the index that the current cache uses; all that exist if that cannot be read."""
    if not (folder / METADATA_NAME).is_file():
        return set()
    try:
        return read_written_names(folder).files
    except MetadataError:
        return {path.name for pattern in _PATTERNS for path in folder.glob(pattern)}


def _publish_shards(folder: Path, parts: Sequence[Sequence[Row]], current: set[str]) -> list[str]:
    shards = []
    for number, part in enumerate(parts):
        content = json.dumps([row.to_dict() for row in part], indent=2)
        names = (f"metadata_shard_{number:04d}{suffix}.json" for suffix in _SUFFIXES)
        name = next(n for n in names if n not in current or _has_text(folder / n, content))
        write_text(folder / name, content)
        shards.append(name)
    return shards


def _has_text(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text("utf-8") == text


def _publish_index(folder: Path, rows: Sequence[Row], current: set[str]) -> PackedHeader:
    path = folder / next(
        n for n in (f"packed_index{suffix}.arrow" for suffix in _SUFFIXES) if n not in current
    )
    old = next((name for name in current if name.endswith(".arrow") and (folder / name).is_file()), None)
    named = [
        msgspec.structs.replace(row, cache_file=row.packed.name) for row in rows if row.packed is not None
    ]
    index = index_of_rows(named, CacheMetadata(shards=[]), folder, aspect_name)
    groups = list(zip(index.bucket_keys, index.rows_by_bucket(), strict=True))
    try:
        header = write_packed_index(path, rows, groups, index.fingerprint)
        if old is not None and filecmp.cmp(path, folder / old, shallow=False):
            path.unlink()  # nothing has changed: the same command leaves the same cache
            return msgspec.structs.replace(header, index=old)
        return header
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None


def write_failures(path: Path, failures: Sequence[Failure]) -> None:
    """Publish ``failures.jsonl``, or remove it if nothing failed."""
    if failures:
        write_text(path, "".join(json.dumps(asdict(failure)) + "\n" for failure in failures))
    else:
        path.unlink(missing_ok=True)


def read_failures(folder: Path) -> list[Failure]:
    """The failures that ``failures.jsonl`` lists; none if there is no such file. Lines of another form are ignored."""
    path = folder / FAILURES_NAME
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(msgspec.MsgspecError):
            found.append(msgspec.json.decode(line, type=Failure))
    return found
