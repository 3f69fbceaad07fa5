"""A cache in the making: who works on it, what is committed, and how it is finished.

While a run is under way the folder holds ``.latentry/``: a lock, the recipe, and one file per committed
task. Rows become part of the cache in one step at the end, when the shards and then ``metadata.json``
are published and ``.latentry/`` is removed. Whatever a stopped run leaves behind is either committed, and
used, or swept away by the next one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from latentry.cache.metadata import METADATA_NAME
from latentry.errors import MetadataError, RunError
from latentry.records import Commit, Failure
from latentry.storage import publish

FORMAT_VERSION = 1
FAILURES_NAME = "failures.jsonl"
_WORK = ".latentry"
_BUCKET_FOLDER = re.compile(r"\d+x\d+")
_CACHE_FILE = re.compile(r"[0-9a-f]{32}\.(meta|pt|safetensors)")
_OUR_ROW_KEYS = (
    "sample_name",
    "source_name",
    "source_bytes",
    "source_modified_ns",
    "source_digest",
    "prompt",
    "bucket_resolution",
)

Row = Mapping[str, Any]


class Workspace:
    """The output folder of one run, locked for as long as ``opened`` lasts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._commits = folder / _WORK / "commits"

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

    def recorded_recipe(self) -> dict[str, Any] | None:
        """The recipe this cache was made or begun with; an error if another tool made it."""
        begun = self.folder / _WORK / "recipe.json"
        if begun.is_file():
            return dict(_read_json(begun, dict))
        finished = self.folder / METADATA_NAME
        if not finished.is_file():
            return None
        recipe = _read_json(finished, dict).get("recipe")
        if not isinstance(recipe, dict):
            raise RunError(
                f"{self.folder} holds a cache of another tool, which cannot be added to; choose another "
                "output_dir, or replace it with --overwrite"
            )
        return recipe

    def record_recipe(self, recipe: Mapping[str, Any]) -> None:
        self._write_json(self.folder / _WORK / "recipe.json", recipe)

    def rows(self) -> dict[str, Row]:
        """All rows that are committed, by sample name: the finished cache's, and those of stopped runs."""
        rows: dict[str, Row] = {}
        finished = self.folder / METADATA_NAME
        if finished.is_file():
            for shard in _read_json(finished, dict).get("shards", []):
                path = self.folder / Path(shard).name
                for row in _read_json(path, list) if path.is_file() else []:
                    rows[row.get("sample_name", "")] = row
        for path in sorted(self._commits.glob("*.json")):
            for row in _read_json(path, dict)["rows"]:
                rows[row["sample_name"]] = row
        return {
            name: row
            for name, row in rows.items()
            if all(key in row for key in _OUR_ROW_KEYS) and self._file(row).is_file()
        }

    def failed_before(self) -> set[str]:
        """Names of inputs that failed in tasks of a stopped run."""
        return {
            failure["name"]
            for path in self._commits.glob("*.json")
            for failure in _read_json(path, dict)["failures"]
        }

    def _file(self, row: Row) -> Path:
        width, height = row["bucket_resolution"]
        return self.folder / f"{width}x{height}" / Path(row["cache_file"]).name

    # ---- working on it ----------------------------------------------------------------------

    def commit(self, commit: Commit) -> None:
        """Make a task's outcome durable, in one step."""
        content = {"rows": list(commit.rows), "failures": [asdict(failure) for failure in commit.failures]}
        self._write_json(self._commits / f"{commit.task_id}.json", content)

    def clear(self) -> None:
        """Remove the cache that is here: what its metadata and its bucket folders show to be one."""
        for path in (self.folder / METADATA_NAME, self.folder / FAILURES_NAME, self.folder / "index.arrow"):
            path.unlink(missing_ok=True)
        for path in self.folder.glob("metadata_shard_*.json"):
            path.unlink()
        for path in [*self._commits.glob("*.json"), self.folder / _WORK / "recipe.json"]:
            path.unlink(missing_ok=True)
        self.sweep([])

    def sweep(self, rows: Iterable[Row]) -> None:
        """Remove cache files that no row names, and drafts that a killed run left."""
        kept = {self._file(row) for row in rows}
        for folder in self.folder.iterdir():
            if not (folder.is_dir() and _BUCKET_FOLDER.fullmatch(folder.name)):
                continue
            for path in folder.iterdir():
                draft = path.name.startswith(".") and path.name.endswith(".tmp")
                if draft or (_CACHE_FILE.fullmatch(path.name) and path not in kept):
                    path.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()

    def finish(
        self, rows: Sequence[Row], failures: Sequence[Failure], shard_size: int, header: Mapping[str, Any]
    ) -> None:
        """Publish the rows as the cache's metadata, ``metadata.json`` last, and tidy up.

        All rows are committed once more in one piece before the first shard is touched: a run that is
        killed in between finds every one of them.
        """
        self.commit(Commit("all", tuple(dict(row) for row in rows), ()))
        shards = [f"metadata_shard_{i:04d}.json" for i in range(-(-len(rows) // shard_size))]
        for number, name in enumerate(shards):
            part = rows[number * shard_size : (number + 1) * shard_size]
            self._write_json(self.folder / name, [dict(row) for row in part], indent=2)
        self._write_failures(failures)
        if rows:
            metadata = {
                **header,
                "total_items": len(rows),
                "num_shards": len(shards),
                "shard_size": shard_size,
                "shards": shards,
                "format_version": FORMAT_VERSION,
            }
            self._write_json(self.folder / METADATA_NAME, metadata, indent=2)
        for path in self.folder.glob("metadata_shard_*.json"):
            if path.name not in shards:
                path.unlink()
        self.sweep(rows)
        shutil.rmtree(self.folder / _WORK)

    def _write_failures(self, failures: Sequence[Failure]) -> None:
        path = self.folder / FAILURES_NAME
        if not failures:
            path.unlink(missing_ok=True)
            return
        with publish(path) as draft:
            draft.write_text(
                "".join(json.dumps(asdict(f), ensure_ascii=False) + "\n" for f in failures), "utf-8"
            )

    def _write_json(self, path: Path, content: Any, indent: int | None = None) -> None:
        try:
            with publish(path) as draft:
                draft.write_text(json.dumps(content, indent=indent, ensure_ascii=False), encoding="utf-8")
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from None


def _read_json(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, kind):
            raise ValueError(f"holds a {type(content).__name__}")
    except ValueError as error:
        raise MetadataError(f"{path} is damaged ({error}); start over with --overwrite") from None
    return content
