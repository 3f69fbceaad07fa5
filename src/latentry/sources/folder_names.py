"""The names in folders, found in any Unicode composition and with endings in any case.

Each folder is listed once, so that a million inputs cost no lookups of absent caption files.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

from latentry.sources.caption_lists import comparable_name


class FolderNames:
    """The entries of one folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.names = frozenset(os.listdir(path))
        except OSError:
            self.names = frozenset()

    @cached_property
    def _comparable(self) -> dict[str, str]:
        """Comparable name to name. Of several, the first in sorted order is found."""
        found: dict[str, str] = {}
        for name in sorted(self.names):
            found.setdefault(_comparable(name), name)
        return found

    def file(self, name: str) -> Path | None:
        """The path of a regular file with this name, or None."""
        found = name if name in self.names else self._comparable.get(_comparable(name))
        if found is None:
            return None
        path = self._path / found
        return path if path.is_file() else None

    def has(self, name: str) -> bool:
        """Whether there is an entry with this name, in any Unicode composition."""
        return name in self.names or _comparable(name) in self._comparable

    def files_ending_in(self, ending: str) -> list[Path]:
        """The regular files whose names end like this, in any case, sorted by name."""
        found = (self._path / name for name in sorted(self.names) if name.lower().endswith(ending))
        return [path for path in found if path.is_file()]


def _comparable(name: str) -> str:
    stem, ending = os.path.splitext(comparable_name(name))
    return stem + ending.lower()
