"""A folder of media, searched recursively."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from latentry.errors import ConfigError
from latentry.records import SourceFile


def list_folder(root: Path, suffixes: Collection[str], *, leave_out: Path | None = None) -> list[SourceFile]:
    """All files under ``root`` with one of these endings (any case), sorted by name.

    Hidden files and folders are passed over, and so is ``leave_out``: the output may lie inside the
    input. Linked folders are not followed, because they can lead in circles.
    """
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        raise ConfigError(f"{root} {what}; name the folder that holds the media")
    left_out = os.path.realpath(leave_out) if leave_out else None
    files = sorted(_walk(os.fspath(root), "", frozenset(suffixes), left_out), key=lambda file: file.name)
    if not files:
        endings = ", ".join(sorted(suffix.lstrip(".") for suffix in suffixes))
        raise ConfigError(f"{root} holds no media; looked for files ending in {endings}, in all its folders")
    return files


def _walk(root: str, prefix: str, suffixes: frozenset[str], left_out: str | None) -> Iterator[SourceFile]:
    try:
        entries = list(os.scandir(os.path.join(root, prefix)))
    except OSError as error:
        raise ConfigError(f"{os.path.join(root, prefix)} cannot be listed: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        name = f"{prefix}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            if left_out is None or os.path.realpath(entry.path) != left_out:
                yield from _walk(root, f"{name}/", suffixes, left_out)
        elif os.path.splitext(entry.name)[1].lower() in suffixes and entry.is_file():
            status = entry.stat()
            yield SourceFile(name, status.st_size, status.st_mtime_ns)
