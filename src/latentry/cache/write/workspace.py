"""A cache that is being made: who works on it, what is committed, and how it is finished.

During a run the folder holds ``.latentry/``: a lock, the recipe, the memory budget, and the commits. Rows become part of the cache in one
step at the end, when ``metadata.json`` is replaced. Until then an earlier cache in the folder stays as it is, even if it
is being overwritten. What an interrupted run leaves behind is either committed and used, or removed when the next run
finishes.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from latentry.cache.format import (
    FAILURES_NAME,
    FORMAT_VERSION,
    METADATA_NAME,
    CacheMetadata,
    Row,
    read_metadata,
    read_row_dicts,
    read_written_names,
    recipe_fingerprint,
    row_from_dict,
)
from latentry.cache.index.packed_index import PackedIndex
from latentry.cache.locator import FileLocator
from latentry.cache.write.commits import Checkpoint, Commit, CommitLog, decode_json, write_text
from latentry.cache.write.publishing import publish_metadata, read_failures, write_failures
from latentry.errors import MetadataError, RunError
from latentry.storage import KnownFolders
from latentry.types import Failure

_WORK = ".latentry"
_BUCKET_FOLDER = re.compile(r"\d+x\d+")
_METADATA_DRAFT = re.compile(
    r"\.(metadata|index|packed_index|failures)[^.]*\.(json|jsonl|arrow)\.[0-9a-f]{32}\.tmp"
)
_CACHE_FILE = re.compile(r"[0-9a-f]{32}((_\d+)?-\d+\.(latents|text|frames))?\.(meta|pt|safetensors)")


class Workspace:
    """The output folder of a run.

    The process that plans and publishes gets its workspace from ``opened``, which locks the folder. Worker processes
    create a ``Workspace`` with the same run number, without locking, and only commit.
    """

    def __init__(self, folder: Path, run: int = 0) -> None:
        self.folder = folder
        self.run = run
        """The number of this run, which orders its commits after those of earlier runs."""
        self._commits_folder = folder / _WORK / "commits"
        self._commits = CommitLog(self._commits_folder, run)
        self._folders = KnownFolders(folder)
        self.locator = FileLocator(folder)
        """Finds the files that rows name."""
        self._recipe = folder / _WORK / "recipe.json"
        self._device_memory = folder / _WORK / "device_memory.json"
        self._overwriting = folder / _WORK / "overwriting"
        self._failed_before = folder / _WORK / FAILURES_NAME
        """The failures of the finished cache, while those of an unfinished run are in its place."""

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Workspace]:
        """Lock the folder, which is created if missing. A second run in it is refused."""
        commits = folder / _WORK / "commits"
        try:
            commits.mkdir(parents=True, exist_ok=True)
            lock = open(folder / _WORK / "lock", "a+")  # noqa: SIM115 - closed below
        except OSError as error:
            raise RunError(f"cannot write to {folder}: {error.strerror}; choose another output_dir") from None
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
            workspace = cls(folder, CommitLog.next_run(commits))
            try:
                yield workspace
            finally:
                workspace._remove_empty_folders()

    def _remove_empty_folders(self) -> None:
        """Leave the folder as it was if the run failed before its first commit."""
        if self._commits_folder.is_dir() and not any(self._commits_folder.iterdir()):
            shutil.rmtree(self.folder / _WORK)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    # ---- what is there ----------------------------------------------------------------------

    def finished(self) -> CacheMetadata | None:
        """The metadata of the finished cache in the folder, if there is one."""
        path = self.folder / METADATA_NAME
        if not path.is_file():
            return None
        try:
            version = read_written_names(self.folder).format_version
            if version not in (None, FORMAT_VERSION):
                raise RunError(
                    f"{path} has format_version {version}, this release writes {FORMAT_VERSION}; "
                    "use the release that made it, or choose another output_dir"
                )
            return read_metadata(self.folder)
        except MetadataError as error:
            raise MetadataError(f"{error}; start over with --overwrite") from None

    def unfinished_recipe(self) -> dict[str, Any] | None:
        """The recipe of a run that has not finished."""
        return dict(decode_json(self._recipe, dict)) if self._recipe.is_file() else None

    def recorded_recipe(self) -> dict[str, Any] | None:
        """The recipe of the unfinished run or of the finished cache; an error if another tool made the cache."""
        if (unfinished := self.unfinished_recipe()) is not None:
            return unfinished
        finished = self.finished()
        if finished is None:
            return None
        if finished.recipe is None:
            raise RunError(
                f"{self.folder} holds a cache of another tool, which cannot be added to; choose another "
                "output_dir, or replace it with --overwrite"
            )
        return finished.recipe

    def unfinished_device_memory(self) -> int | None:
        """The memory budget of a run that has not finished, in bytes; None if it had none."""
        if not self._device_memory.is_file():
            return None
        return int(decode_json(self._device_memory, int))

    def recorded_device_memory(self) -> int | None:
        """The memory budget of the last run that encoded something, finished or not; None if it had none."""
        if (unfinished := self.unfinished_device_memory()) is not None or self._overwriting.exists():
            return unfinished
        finished = self.finished()
        return finished.device_memory if finished is not None else None

    def rows(self, fingerprint: str) -> dict[str, Row]:
        """All usable rows of this recipe by sample name: the finished cache's, then those of interrupted runs.

        If the finished cache repeats a sample, its ``repeat`` is that of the last row.
        """
        rows: dict[str, Row] = {}
        finished = None if self._overwriting.exists() else self.finished()
        if (
            finished is not None
            and finished.recipe is not None
            and recipe_fingerprint(finished.recipe) == fingerprint
        ):
            rows |= self._usable(self._finished_rows(finished))
        for name, row in self._usable(self._commits.rows()).items():
            rows[name] = msgspec.structs.replace(row, repeat=rows[name].repeat) if name in rows else row
        return rows

    def _finished_rows(self, metadata: CacheMetadata) -> Iterator[Row]:
        if metadata.packed is not None:
            yield from PackedIndex(self.folder, metadata).typed_rows()
        for shard in metadata.shards:
            if not (self.folder / shard).is_file():
                continue
            for row in read_row_dicts(self.folder, shard):
                try:
                    yield row_from_dict(row)
                except msgspec.ValidationError:
                    continue

    def _usable(self, rows: Iterable[Row]) -> dict[str, Row]:
        """The rows that a run can rely on: complete, and with their files in place."""
        sizes: dict[str, int] = {}
        return {
            row.sample_name: row for row in rows if _is_complete(row) and self._files_in_place(row, sizes)
        }

    def _files_in_place(self, row: Row, sizes: dict[str, int]) -> bool:
        """Whether the row's files exist and are large enough; ``sizes`` caches the sizes of files."""
        files = row.files(self.locator)
        for file in files:
            if file not in sizes:
                path = self._folders.path_inside(file)
                sizes[file] = os.path.getsize(path) if os.path.isfile(path) else -1
        if row.packed is None:
            return sizes[files[0]] == row.file_bytes
        return all(
            sizes[location.file] >= location.offset + location.num_bytes
            for location in row.packed.locations.values()
        )

    def committed_rows(self, task_ids: Iterable[str]) -> list[Row]:
        """The rows of these tasks."""
        return self._commits.rows_of(task_ids)

    def is_committed(self, task_id: str, num_samples: int) -> bool:
        """Whether the task is committed with all its samples, and all their files are in place."""
        sizes: dict[str, int] = {}
        try:
            rows = self._commits.rows_of([task_id])
        except KeyError:
            return False
        return len(rows) == num_samples and all(self._files_in_place(row, sizes) for row in rows)

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints of unfinished tasks, with the rows that are usable."""
        return [
            dataclasses.replace(checkpoint, rows=tuple(self._usable(checkpoint.rows).values()))
            for checkpoint in self._commits.checkpoints()
        ]

    def checkpoint_of(self, task_id: str) -> Checkpoint:
        """The checkpoint of a task."""
        return self._commits.checkpoint_of(task_id)

    def failed_before(self) -> set[str]:
        """The names of inputs that failed in an earlier run, finished or interrupted.

        Failures of an interrupted run that are not committed are left out: its tasks must be cut again as they were.
        """
        folder = self._failed_before.parent if self._failed_before.is_file() else self.folder
        return {failure.name for failure in (*self._commits.failures(), *read_failures(folder))}

    # ---- working on it ----------------------------------------------------------------------

    def begin(self, recipe: Mapping[str, Any], *, overwrite: bool) -> None:
        """Record the recipe of this run.

        The first run that overwrites discards the commits of earlier runs. If it is interrupted, a later run with the
        same recipe resumes it and keeps its commits.
        """
        same = self.unfinished_recipe() == json.loads(json.dumps(recipe))
        if overwrite and not (same and self._overwriting.exists()):
            self._commits.clear()
            self.record_device_memory(None)
            self._overwriting.touch()
        write_text(self._recipe, json.dumps(recipe))

    def record_device_memory(self, num_bytes: int | None) -> None:
        """Record the memory budget of this run before it encodes anything.

        Args:
            num_bytes: The budget; None if the run has none.
        """
        if num_bytes is None:
            self._device_memory.unlink(missing_ok=True)
        else:
            write_text(self._device_memory, json.dumps(num_bytes))

    def commit(self, commit: Commit) -> None:
        """Make the outcome of a task, or of its first samples, durable in one step."""
        self._commits.write(commit)

    def record_failures(self, failures: Iterable[Failure]) -> None:
        """Add failures to ``failures.jsonl`` without finishing the run. What it held before is kept beside the commits.

        Args:
            failures: Those of this run.
        """
        if not self._failed_before.is_file():
            path = self.folder / FAILURES_NAME
            write_text(self._failed_before, path.read_text("utf-8") if path.is_file() else "")
        committed = {row.sample_name for row in self._commits.rows()}
        found = {
            failure.name: failure for failure in (*read_failures(self.folder), *self._commits.failures())
        }
        found = {name: failure for name, failure in found.items() if name not in committed}
        found |= {failure.name: failure for failure in failures}
        write_failures(self.folder / FAILURES_NAME, [found[name] for name in sorted(found)])

    def finish(
        self, rows: Sequence[Row], failures: Sequence[Failure], shard_size: int, metadata: CacheMetadata
    ) -> None:
        """Publish the rows as the cache's metadata, in the one step of replacing ``metadata.json``.

        The commits are removed last: if the process is killed before, the next run finds every row again.
        """
        publish_metadata(self.folder, rows, failures, shard_size, metadata)
        self.remove_unused(rows)
        shutil.rmtree(self.folder / _WORK)

    def remove_drafts(self) -> None:
        """Remove the temporary files of killed processes."""
        for path in self.folder.glob(".*.tmp"):
            if _METADATA_DRAFT.fullmatch(path.name):
                path.unlink(missing_ok=True)
        for folder in self._bucket_folders():
            for path in folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)

    def remove_unused(self, rows: Iterable[Row]) -> None:
        """Remove temporary files, and cache files that no row names."""
        self.remove_drafts()
        kept = {self.folder / file for row in rows for file in row.files(self.locator)}
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


def _is_complete(row: Row) -> bool:
    """Whether the row has everything that a later run compares."""
    return bool(
        row.sample_name
        and row.source_name
        and row.source_digest
        and row.source_bytes is not None
        and row.source_modified_ns is not None
        and row.prompt is not None
        and row.bucket_resolution is not None
    )
