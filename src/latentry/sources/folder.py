"""Folders of images or videos, searched recursively.

A file is named by its path relative to the first folder, so the names of one folder stay the same when others are
added, and folders that are moved together keep their names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from latentry.errors import ConfigError
from latentry.types import Failure, SourceFile


@dataclass(frozen=True, slots=True)
class SourceFolders:
    """The folders of a run's inputs. Everything that opens an input finds it here."""

    roots: tuple[Path, ...]
    """Absolute paths."""

    def path(self, name: str) -> Path:
        """Where the file of this name is. Names in further folders begin with ``../``."""
        return Path(os.path.normpath(self.roots[0] / name))

    def __str__(self) -> str:
        return ", ".join(str(root) for root in self.roots)


def list_folder(
    root: Path, suffixes: Collection[str], *, leave_out: Path | None = None
) -> tuple[list[SourceFile], list[Failure]]:
    """The files under ``root`` with one of these extensions, and a failure for each match that is not a file.

    Both are sorted by name. Hidden files and folders are skipped. Symbolic links to folders are followed, but no
    folder is listed twice.

    Args:
        root: The folder.
        suffixes: Extensions with the dot, in lower case. Files match in any case.
        leave_out: A folder to skip: the output may be inside the input.
    """
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        raise ConfigError(f"{root} {what}; give the folder of the images or videos")
    seen = {os.path.realpath(root), *([os.path.realpath(leave_out)] if leave_out else [])}
    found = sorted(_walk(os.fspath(root), "", frozenset(suffixes), seen), key=lambda entry: entry.name)
    if not found:
        endings = ", ".join(sorted(suffix.lstrip(".") for suffix in suffixes))
        raise ConfigError(
            f"{root} holds no media; looked for files ending in {endings}, in all its subfolders"
        )
    files = [entry for entry in found if isinstance(entry, SourceFile)]
    return files, [entry for entry in found if isinstance(entry, Failure)]


def _walk(root: str, prefix: str, suffixes: frozenset[str], seen: set[str]) -> Iterator[SourceFile | Failure]:
    try:
        entries = sorted(os.scandir(os.path.join(root, prefix)), key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError(f"{os.path.join(root, prefix)} cannot be listed: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            real = os.path.realpath(entry.path)
            if real not in seen:
                seen.add(real)
                yield from _walk(root, f"{name}/", suffixes, seen)
        elif os.path.splitext(entry.name)[1].lower() in suffixes:
            if entry.is_file():
                status = entry.stat()
                yield SourceFile(name, status.st_size, status.st_mtime_ns)
            else:
                yield Failure(name, "is a broken link" if entry.is_symlink() else "is not a regular file")
