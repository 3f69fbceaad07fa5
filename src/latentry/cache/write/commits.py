"""The committed tasks of a run: one file each, published in one step.

A file's name begins with the number of the run that wrote it. Where two commits have the same sample, the later
run's row takes precedence. File times do not matter: they change when a folder is copied.

A checkpoint is the commit of the first samples of a task. The next checkpoint of the task replaces it, and the
task's commit removes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from latentry.cache.format import Row, row_from_dict
from latentry.errors import MetadataError, RunError
from latentry.storage import publish
from latentry.types import Failure

_COMMIT_NAME = re.compile(r"(?:(\d+)-)?([0-9a-z]+)\.json")
"""Older releases wrote no run number."""
_CHECKPOINT_NAME = re.compile(r"(\d+)-([0-9a-z]+)\.checkpoint\.json")


@dataclass(frozen=True, slots=True)
class Commit:
    """The outcome of a task: rows for the metadata, and what failed."""

    task_id: str
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint(Commit):
    """The outcome of the first samples of a task that is not finished."""

    num_samples: int
    """How many samples these are, failures included. The batch after them starts with the next sample."""


class _CommitFile(msgspec.Struct):
    rows: list[dict[str, Any]]
    failures: list[Failure]


class _CheckpointFile(_CommitFile):
    num_samples: int


class CommitLog:
    """The commits in a folder. ``run`` is the number that new commits get."""

    def __init__(self, folder: Path, run: int) -> None:
        self._folder = folder
        self._run = run

    @staticmethod
    def next_run(folder: Path) -> int:
        """One more than the number of the last run that committed something."""
        listed = [*_listed(folder), *_listed(folder, _CHECKPOINT_NAME)]
        return 1 + max((run for run, _, _ in listed), default=0)

    def write(self, commit: Commit) -> None:
        """Make the outcome of a task, or of its first samples, durable in one step."""
        content: dict[str, Any] = {
            "rows": [row.to_dict() for row in commit.rows],
            "failures": [asdict(failure) for failure in commit.failures],
        }
        name = f"{self._run:06d}-{commit.task_id}.json"
        if isinstance(commit, Checkpoint):
            content["num_samples"] = commit.num_samples
            name = f"{self._run:06d}-{commit.task_id}.checkpoint.json"
        write_text(self._folder / name, json.dumps(content))
        for path in self._folder.glob(f"*-{commit.task_id}.checkpoint.json"):
            if path.name != name:
                path.unlink(missing_ok=True)

    def rows(self) -> Iterator[Row]:
        """The rows of all commits, the earliest run's first."""
        for _, _, path in _listed(self._folder):
            yield from _typed(_read(path).rows)

    def failures(self) -> Iterator[Failure]:
        """The failures of all commits."""
        for _, _, path in _listed(self._folder):
            yield from _read(path).failures

    def rows_of(self, task_ids: Iterable[str]) -> list[Row]:
        """The rows of these tasks, each in its latest commit. Raises ``KeyError`` if one is not committed."""
        paths = {task_id: path for _, task_id, path in _listed(self._folder)}
        return [row for task_id in task_ids for row in _typed(_read(paths[task_id]).rows)]

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoint of each unfinished task that has one, the earliest run's first."""
        latest = {task_id: path for _, task_id, path in _listed(self._folder, _CHECKPOINT_NAME)}
        return [_checkpoint(task_id, path) for task_id, path in latest.items()]

    def checkpoint_of(self, task_id: str) -> Checkpoint:
        """The checkpoint of this task. Raises ``KeyError`` if it has none."""
        latest = {found: path for _, found, path in _listed(self._folder, _CHECKPOINT_NAME)}
        return _checkpoint(task_id, latest[task_id])

    def clear(self) -> None:
        """Remove all commits and checkpoints."""
        for _, _, path in [*_listed(self._folder), *_listed(self._folder, _CHECKPOINT_NAME)]:
            path.unlink()


def _checkpoint(task_id: str, path: Path) -> Checkpoint:
    content: _CheckpointFile = decode_json(path, _CheckpointFile)
    return Checkpoint(task_id, tuple(_typed(content.rows)), tuple(content.failures), content.num_samples)


def _listed(folder: Path, name: re.Pattern[str] = _COMMIT_NAME) -> list[tuple[int, str, Path]]:
    """(run, task id, path) of each file with such a name, in order of precedence, the lowest first."""
    found = []
    for path in folder.glob("*.json"):
        match = name.fullmatch(path.name)
        if match:
            found.append((int(match[1] or 0), match[2], path))
    return sorted(found)


def _read(path: Path) -> _CommitFile:
    content: _CommitFile = decode_json(path, _CommitFile)
    return content


def _typed(rows: Iterable[dict[str, Any]]) -> Iterator[Row]:
    """Typed rows; a row that is not valid is left out, and its sample is encoded again."""
    for row in rows:
        try:
            yield row_from_dict(row)
        except msgspec.ValidationError:
            continue


def decode_json(path: Path, kind: type[Any]) -> Any:
    """The file's content as this type."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, OSError, RecursionError) as error:
        raise MetadataError(f"{path} is damaged ({error}); start over with --overwrite") from None


def write_text(path: Path, text: str) -> None:
    """Publish a text file, in one step."""
    try:
        with publish(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None
