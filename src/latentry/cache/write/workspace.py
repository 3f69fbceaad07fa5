"""A cache in the making: who works on it, what is committed, and how it is finished.

While a run is under way the folder holds ``.latentry/``: a lock, the recipe, and one file per committed
task. Rows become part of the cache in one step at the end, when ``metadata.json`` is replaced; until then
an earlier cache in the folder stays as it is, even if it is being overwritten. Whatever a stopped run leaves
behind is either committed, and used, or swept away by the next one.
"""

from __future__ import annotations

import fcntl
import filecmp
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from latentry.buckets import aspect_name
from latentry.cache.format import METADATA_NAME, PACKED, GlobalMetadata, file_name, read_global_metadata
from latentry.cache.index import index_of_rows
from latentry.cache.packed.index import (
    Entry,
    Header,
    PackedIndex,
    check_places,
    committed_rows,
    write_index,
)
from latentry.errors import MetadataError, RunError
from latentry.storage import publish
from latentry.types import Commit, Failure

FORMAT_VERSION = 1
FAILURES_NAME = "failures.jsonl"
_WORK = ".latentry"
_BUCKET_FOLDER = re.compile(r"\d+x\d+")
_CACHE_FILE = re.compile(r"[0-9a-f]{32}((_\d+)?-\d+\.(latents|text|frames))?\.(meta|pt|safetensors)")

Row = dict[str, Any]
T = TypeVar("T")


class _OurRow(msgspec.Struct):
    """What a row must have for a later run to rely on it."""

    cache_file: str
    sample_name: str
    source_name: str
    source_bytes: int
    source_modified_ns: int
    source_digest: str
    prompt: str
    bucket_resolution: tuple[int, int]
    num_frames: int | None = None


class _CommitFile(msgspec.Struct):
    rows: list[dict[str, Any]]
    failures: list[dict[str, str]]


class _Metadata(msgspec.Struct):
    shards: list[str] = []
    recipe: dict[str, Any] | None = None
    fingerprint: str | None = None
    format_version: int | None = None
    packed: dict[str, Any] | None = None


class Workspace:
    """The output folder of one run, locked for as long as ``opened`` lasts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._commits = folder / _WORK / "commits"
        self._recipe = folder / _WORK / "recipe.json"

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Workspace]:
        """Lock the folder, making it if need be; a second run in it is refused."""
        try:
            (folder / _WORK / "commits").mkdir(parents=True, exist_ok=True)
            lock = open(folder / _WORK / "lock", "a+")  # noqa: SIM115 - closed below
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written to: {error.strerror}; choose another output_dir"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.seek(0)
                raise RunError(
                    f"another run (process {lock.read().strip() or 'unknown'}) is writing to {folder}; "
                    "wait for it, or choose another output_dir"
                ) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            workspace = cls(folder)
            try:
                yield workspace
            finally:
                workspace._leave_nothing_empty()

    def _leave_nothing_empty(self) -> None:
        """A run that failed before its first commit leaves the folder as it found it."""
        if self._commits.is_dir() and not any(self._commits.iterdir()):
            shutil.rmtree(self.folder / _WORK)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    # ---- what is there ----------------------------------------------------------------------

    def _finished(self) -> _Metadata | None:
        """The metadata of the finished cache that is here, if there is one."""
        path = self.folder / METADATA_NAME
        if not path.is_file():
            return None
        metadata = _decode(path, _Metadata)
        if metadata.format_version not in (None, FORMAT_VERSION):
            raise RunError(
                f"{path} has format_version {metadata.format_version}, this release writes {FORMAT_VERSION}; "
                "use the release that made it, or choose another output_dir"
            )
        return metadata

    def begun(self) -> dict[str, Any] | None:
        """What was recorded by a run that has not finished."""
        return dict(_decode(self._recipe, dict)) if self._recipe.is_file() else None

    def recorded_recipe(self) -> dict[str, Any] | None:
        """The recipe this cache was made or begun with; an error if another tool made it."""
        if self._recipe.is_file():
            return dict(_decode(self._recipe, dict))
        finished = self._finished()
        if finished is None:
            return None
        if finished.recipe is None:
            raise RunError(
                f"{self.folder} holds a cache of another tool, which cannot be added to; choose another "
                "output_dir, or replace it with --overwrite"
            )
        return finished.recipe

    def begin(self, recipe: Mapping[str, Any], *, overwrite: bool) -> None:
        """Record the recipe. Overwriting sets aside what is here, once: going on with it later does not."""
        marker = self.folder / _WORK / "overwriting"
        same = self._recipe.is_file() and _decode(self._recipe, dict) == json.loads(json.dumps(recipe))
        if overwrite and not (same and marker.exists()):
            for path in self._commits.glob("*.json"):
                path.unlink()
            marker.touch()
        self._write_json(self._recipe, recipe)

    def rows(self, fingerprint: str) -> dict[str, Row]:
        """All committed rows of this recipe, by sample name: the finished cache's, and those of stopped runs."""
        rows: dict[str, Row] = {}
        finished = None if (self.folder / _WORK / "overwriting").exists() else self._finished()
        if finished is not None and finished.fingerprint == fingerprint:
            for shard in finished.shards:
                path = self.folder / Path(shard).name
                if path.is_file():
                    rows |= self._usable(_decode(path, list[dict[str, Any]]))
            if finished.packed is not None:
                rows |= self._usable(committed_rows(self._packed_index()))
        # Oldest first, so that what was encoded last is what counts.
        for path in sorted(self._commits.glob("*.json"), key=lambda p: (p.stat().st_mtime_ns, p.name)):
            rows |= self._usable(_decode(path, _CommitFile).rows)
        return rows

    def _packed_index(self) -> PackedIndex:
        return PackedIndex(self.folder, read_global_metadata(self.folder))

    def _usable(self, rows: Iterable[Row]) -> dict[str, Row]:
        """The rows that a run can rely on: complete, and with their file in place."""
        usable = {}
        sizes: dict[str, int] = {}
        for row in rows:
            try:
                ours = msgspec.convert(row, _OurRow)
                if self._in_place(row, sizes):
                    usable[ours.sample_name] = row
            except (msgspec.ValidationError, OSError):
                continue
        return usable

    def committed(self, task_ids: Iterable[str]) -> list[Row]:
        """The rows of these tasks."""
        return [
            row
            for task_id in task_ids
            for row in _decode(self._commits / f"{task_id}.json", _CommitFile).rows
        ]

    def holds(self, task_id: str) -> bool:
        """Whether the task is committed, and all its files are in place."""
        if not (self._commits / f"{task_id}.json").is_file():
            return False
        sizes: dict[str, int] = {}
        return all(self._in_place(row, sizes) for row in self.committed([task_id]))

    def _in_place(self, row: Row, sizes: dict[str, int]) -> bool:
        """Whether the row's file is there, with as many bytes as were written."""
        if PACKED in row:
            return check_places(self.folder, msgspec.convert(row[PACKED], Entry), sizes)
        path = cache_file_of(self.folder, row)
        return path.is_file() and path.stat().st_size == row.get("file_bytes")

    def failed_before(self) -> set[str]:
        """Names of inputs that failed in an earlier run, finished or stopped."""
        failures = [
            failure
            for path in self._commits.glob("*.json")
            for failure in _decode(path, _CommitFile).failures
        ]
        listed = self.folder / FAILURES_NAME
        if listed.is_file():
            failures += [json.loads(line) for line in listed.read_text(encoding="utf-8").splitlines() if line]
        return {failure["name"] for failure in failures}

    # ---- working on it ----------------------------------------------------------------------

    def commit(self, commit: Commit) -> None:
        """Make a task's outcome durable, in one step."""
        content = {"rows": list(commit.rows), "failures": [asdict(failure) for failure in commit.failures]}
        self._write_json(self._commits / f"{commit.task_id}.json", content)

    def remove_drafts(self) -> None:
        """Remove what a process that was ended in mid-write left."""
        for folder in self._bucket_folders():
            for path in folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)

    def sweep(self, rows: Iterable[Row]) -> None:
        """Remove drafts, and cache files that no row names."""
        self.remove_drafts()
        kept = {path for row in rows for path in files_of(self.folder, row)}
        for folder in self._bucket_folders():
            for path in folder.iterdir():
                if _CACHE_FILE.fullmatch(path.name) and path not in kept:
                    path.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()

    def _bucket_folders(self) -> list[Path]:
        return [
            path for path in self.folder.iterdir() if path.is_dir() and _BUCKET_FOLDER.fullmatch(path.name)
        ]

    def finish(
        self, rows: Sequence[Row], failures: Sequence[Failure], shard_size: int, header: Mapping[str, Any]
    ) -> None:
        """Publish the rows as the cache's metadata, in the one step of replacing ``metadata.json``.

        New shards get names that the metadata in force does not list, so a reader sees the old cache or the
        new one, whenever it comes. All rows are committed in one piece first: a run that is killed in between
        finds every one of them.
        """
        self.commit(Commit("all", tuple(rows), ()))
        packed = self._publish_index(rows) if rows and PACKED in rows[0] else None
        parts = [] if packed else [rows[i : i + shard_size] for i in range(0, len(rows), shard_size)]
        shards = self._publish_shards(parts)
        metadata = {
            **header,
            "total_items": len(rows),
            "num_shards": len(shards),
            "shard_size": shard_size,
            "shards": shards,
            "format_version": FORMAT_VERSION,
            **({PACKED: msgspec.to_builtins(packed)} if packed else {}),
        }
        if rows:
            self._write_json(self.folder / METADATA_NAME, metadata, indent=2)
        else:
            (self.folder / METADATA_NAME).unlink(missing_ok=True)
        self._write_failures(failures)
        keep = {*shards, packed.index if packed else ""}
        for pattern in ("metadata_shard_*.json", "index*.arrow"):
            for path in self.folder.glob(pattern):
                if path.name not in keep:
                    path.unlink()
        self.sweep(rows)
        shutil.rmtree(self.folder / _WORK)

    def _publish_shards(self, parts: Sequence[Sequence[Row]]) -> list[str]:
        path = self.folder / METADATA_NAME
        in_force = set(_decode(path, _Metadata).shards) if path.is_file() else set()
        shards = []
        for number, part in enumerate(parts):
            content = json.dumps(list(part), indent=2)
            names = (f"metadata_shard_{number:04d}{suffix}.json" for suffix in ("", "_b", "_c"))
            name = next(
                n for n in names if n not in in_force or (self.folder / n).read_text("utf-8") == content
            )
            self._write_text(self.folder / name, content)
            shards.append(name)
        return shards

    def _publish_index(self, rows: Sequence[Row]) -> Header:
        """The index of a packed cache, under a name that the metadata in force does not use."""
        finished = self._finished()
        in_force = (finished.packed or {}).get("index") if finished else None
        if in_force not in ("index.arrow", "index_b.arrow") or not (self.folder / in_force).is_file():
            in_force = None
        path = self.folder / ("index_b.arrow" if in_force == "index.arrow" else "index.arrow")
        named = [{**row, "cache_file": row[PACKED]["name"]} for row in rows]
        index = index_of_rows(named, GlobalMetadata(shards=[]), self.folder, aspect_name)
        groups = zip(index.shapes, index.rows_by_shape(), strict=True)
        try:
            header = write_index(path, rows, list(groups), index.fingerprint)
            if in_force and filecmp.cmp(path, self.folder / in_force, shallow=False):
                path.unlink()  # nothing has changed: the same command leaves the same cache
                header.index = in_force
            return header
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from None

    def _write_failures(self, failures: Sequence[Failure]) -> None:
        path = self.folder / FAILURES_NAME
        if failures:
            self._write_text(path, "".join(json.dumps(asdict(failure)) + "\n" for failure in failures))
        else:
            path.unlink(missing_ok=True)

    def _write_json(self, path: Path, content: Any, indent: int | None = None) -> None:
        self._write_text(path, json.dumps(content, indent=indent))

    def _write_text(self, path: Path, text: str) -> None:
        try:
            with publish(path) as draft:
                draft.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from None


def cache_file_of(folder: Path, row: Mapping[str, Any]) -> Path:
    """Where the row's file is now: the cache may have been moved since it was written."""
    width, height = row["bucket_resolution"]
    return folder / f"{width}x{height}" / file_name(row["cache_file"])


def files_of(folder: Path, row: Mapping[str, Any]) -> list[Path]:
    """All files that hold something of a sample."""
    if PACKED not in row:
        return [cache_file_of(folder, row)]
    return [folder / place["file"] for place in row[PACKED]["places"].values()]


def _decode(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, OSError, RecursionError) as error:
        raise MetadataError(f"{path} is damaged ({error}); start over with --overwrite") from None
