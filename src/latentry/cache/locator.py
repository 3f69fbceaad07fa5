"""Where the files of a cache are, given what its rows say.

A row records the path of its file on the machine that wrote it. Since then the cache may have been moved, or merged
with others into one folder. Looking for each file in each place would cost several system calls per row. So a place is
looked for once per folder that rows name, with the first of its files that is asked for, and never outside of the
cache. Opening a cache looks for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def split_path(path: str) -> tuple[str, str]:
    """The folder and the last part of a path, which may come from any operating system."""
    if "\\" in path:
        path = path.replace("\\", "/")
    folder, _, name = path.rpartition("/")
    return folder, name


class FileLocator:
    """Finds the files of one cache.

    >>> locator = FileLocator(Path("/new/cache"))
    >>> locator.relative_file("/old/cache/part_a/256x256", "0a1b.pt", "256x256")
    'part_a/256x256/0a1b.pt'

    These folders are tried in order, and the first that has the file is taken for all files that were recorded in the
    same folder and have the same bucket:

    1. the recorded folder, if it lies inside the cache; a relative one from the cache, then from the working directory
    2. the end of the recorded folder inside the cache, the longest end first: a cache that was moved
    3. the folder of the bucket
    4. the cache itself

    Args:
        cache_dir: The folder of the cache.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._root = os.path.abspath(cache_dir)
        self._found: dict[tuple[str, str], str] = {}

    def relative_file(self, folder: str, name: str, bucket_folder: str) -> str:
        """A file's path relative to the cache. If it is nowhere, that of the bucket's folder.

        Args:
            folder: The folder that the row says.
            name: The file's name.
            bucket_folder: The name of the bucket's folder, such as ``512x512``.
        """
        found = self._found.get((folder, bucket_folder))
        if found is None:
            found = self._search(folder, name, bucket_folder)
        return f"{found}/{name}" if found else name

    def _search(self, folder: str, name: str, bucket_folder: str) -> str:
        for candidate in self._candidates(folder, bucket_folder):
            if os.path.exists(os.path.join(self._root, candidate, name)):
                self._found[folder, bucket_folder] = candidate
                return candidate
        return bucket_folder

    def _candidates(self, folder: str, bucket_folder: str) -> Iterator[str]:
        is_absolute = folder.startswith("/")
        for start in ["/"] if is_absolute else [self._root, _working_directory()]:
            inside = self._inside(os.path.normpath(os.path.join(start, folder)))
            if inside is not None:
                yield inside
        parts = [part for part in folder.split("/") if part not in ("", ".")]
        if ".." in parts:
            parts = parts[len(parts) - parts[::-1].index("..") :]
        for first in range(len(parts)):
            yield "/".join(parts[first:])
        yield bucket_folder
        yield ""

    def _inside(self, path: str) -> str | None:
        """The path relative to the cache; None if it is outside."""
        if path == self._root:
            return ""
        prefix = os.path.join(self._root, "")
        return path[len(prefix) :] if path.startswith(prefix) else None


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return "/"
