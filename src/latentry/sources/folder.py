"""Folders of images or videos, searched recursively.

A file is named by its path relative to the first folder, so the names of one folder stay the same when others are
added, and folders that are moved together keep their names. Files that are not taken are listed too: an input that is
ignored in silence is missed only when the training is over.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path, PurePath

from latentry.errors import ConfigError
from latentry.types import Failure, SourceFile

HIDDEN, NO_ENDING = "(hidden)", "(none)"
_NUM_ENDINGS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class SourceFolders:
    """The folders of a run's inputs. Everything that opens an input finds it here."""

    roots: tuple[Path, ...]
    """Absolute paths."""
    prefixes: tuple[str, ...] = field(init=False)
    """What the names in each folder begin with, such as ``../B/``; empty for the first."""

    def __post_init__(self) -> None:
        first = self.roots[0]
        others = (PurePath(os.path.relpath(root, first)).as_posix() + "/" for root in self.roots[1:])
        object.__setattr__(self, "prefixes", ("", *others))

    @classmethod
    def of(cls, folders: Sequence[str | os.PathLike[str]]) -> SourceFolders:
        """These folders, checked: each exists, and none contains another."""
        roots = tuple(_absolute(folder) for folder in folders)
        for root in roots:
            if not root.is_dir():
                what = "is a file, not a folder" if root.exists() else "does not exist"
                raise ConfigError(f"{root} {what}; give the folder of the images or videos")
        for first, second in combinations(roots, 2):
            if first.resolve() == second.resolve():
                raise ConfigError(f"{first} and {second} are the same folder; give it once")
            for outer, inner in ((first, second), (second, first)):
                if inner.is_relative_to(outer) or inner.resolve().is_relative_to(outer.resolve()):
                    raise ConfigError(f"{outer} contains {inner}; give only one of them")
        return cls(roots)

    def path(self, name: str) -> Path:
        """Where the file of this name is. Names in further folders begin with ``../``."""
        return Path(os.path.normpath(self.roots[0] / name))

    def locate(self, name: str) -> tuple[int, str] | None:
        """The number of a name's folder and the name within it; None if it is in none of these folders.

        >>> SourceFolders((Path("/data/A"), Path("/data/B"))).locate("../B/cats/tom.jpg")
        (1, 'cats/tom.jpg')
        """
        if not name.startswith("../"):
            return 0, name
        for number, prefix in enumerate(self.prefixes[1:], start=1):
            if name.startswith(prefix):
                return number, name[len(prefix) :]
        return None

    def __str__(self) -> str:
        return ", ".join(str(root) for root in self.roots)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What the folders hold: the inputs, and everything else."""

    files: Sequence[SourceFile] = ()
    """The inputs: folder by folder, and sorted by name in each."""
    unreadable: Sequence[Failure] = ()
    """Names with one of the right endings that are not files."""
    others: Sequence[str] = ()
    """The names of all files with other endings."""
    num_hidden: int = 0
    """Hidden files and folders, which are not searched."""

    def ignored(self, taken: Collection[str]) -> dict[str, int]:
        """Files that were not taken, by ending, most frequent first.

        Args:
            taken: The names that were taken, as inputs or for their captions.
        """
        names = [file.name for file in self.files] + list(self.others)
        return count_endings((name for name in names if name not in taken), self.num_hidden)


def count_endings(names: Iterable[str], num_hidden: int = 0) -> dict[str, int]:
    """Names per ending, most frequent first: ``{".heic": 299, "(none)": 2, "(hidden)": 1}``."""
    counts = Counter(_ending(name) for name in names)
    if num_hidden:
        counts[HIDDEN] = num_hidden
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def list_folders(
    source: SourceFolders, suffixes: Collection[str], *, media: str = "image", leave_out: Path | None = None
) -> Listing:
    """The files under the folders that have one of these extensions, and the names of the others.

    Symbolic links to folders are followed, but no folder is listed twice.

    Args:
        source: The folders.
        suffixes: Extensions with the dot, in lower case. Files match in any case.
        media: ``image`` or ``video``, for the error if a folder holds none.
        leave_out: A folder to skip: the output may be inside the input.
    """
    seen = {os.path.realpath(root) for root in source.roots}
    if leave_out is not None:
        seen.add(os.path.realpath(leave_out))
    files: list[SourceFile] = []
    unreadable: list[Failure] = []
    others: list[str] = []
    num_hidden = 0
    for root, prefix in zip(source.roots, source.prefixes, strict=True):
        walk = _Walk(os.fspath(root), prefix, frozenset(suffixes), seen)
        found = sorted(walk.files(""), key=lambda entry: entry.name)
        if not found:
            raise ConfigError(_nothing_found(root, media, suffixes, count_endings(walk.others)))
        files += [entry for entry in found if isinstance(entry, SourceFile)]
        unreadable += [entry for entry in found if isinstance(entry, Failure)]
        others += walk.others
        num_hidden += walk.num_hidden
    return Listing(files=files, unreadable=unreadable, others=others, num_hidden=num_hidden)


@dataclass(slots=True)
class _Walk:
    """Lists one folder, and remembers what it passes over."""

    root: str
    prefix: str
    """What the names of this folder begin with."""
    suffixes: frozenset[str]
    seen: set[str]
    """The real paths of folders that are not listed again."""
    others: list[str] = field(default_factory=list)
    num_hidden: int = 0

    def files(self, folder: str) -> Iterator[SourceFile | Failure]:
        try:
            entries = sorted(os.scandir(os.path.join(self.root, folder)), key=lambda entry: entry.name)
        except OSError as error:
            raise ConfigError(
                f"{os.path.join(self.root, folder)} cannot be listed: {error.strerror}"
            ) from None
        for entry in entries:
            name = f"{self.prefix}{folder}{entry.name}"
            if entry.name.startswith("."):
                if os.path.realpath(entry.path) not in self.seen:
                    self.num_hidden += 1
            elif entry.is_dir():
                real = os.path.realpath(entry.path)
                if real not in self.seen:
                    self.seen.add(real)
                    yield from self.files(f"{folder}{entry.name}/")
            elif os.path.splitext(entry.name)[1].lower() not in self.suffixes:
                self.others.append(name)
            elif entry.is_file():
                status = entry.stat()
                yield SourceFile(name, status.st_size, status.st_mtime_ns)
            else:
                yield Failure(name, "is a broken link" if entry.is_symlink() else "is not a regular file")


def _absolute(folder: str | os.PathLike[str]) -> Path:
    """The absolute path. Names are joined to it as text, which ``..`` after a symbolic link would break."""
    path = Path(folder).expanduser().absolute()
    return path.resolve() if ".." in path.parts else path


def _ending(name: str) -> str:
    ending = os.path.splitext(name.rpartition("/")[2])[1].lower()
    return ending.encode(errors="backslashreplace").decode() or NO_ENDING


def _nothing_found(root: Path, media: str, suffixes: Collection[str], others: Mapping[str, int]) -> str:
    """What the folder holds instead of media, so that a user sees which endings are not read."""
    looked_for = ", ".join(sorted(suffix.lstrip(".") for suffix in suffixes))
    counts = list(others.items())
    parts = [_num_files(count, ending) for ending, count in counts[:_NUM_ENDINGS_SHOWN]]
    if len(counts) > _NUM_ENDINGS_SHOWN:
        parts.append(_num_files(sum(count for _, count in counts[_NUM_ENDINGS_SHOWN:]), "other"))
    held = ", ".join(parts) or "no files"
    return f"{root} holds no {media}s; it and its subfolders have {held}, and files ending in {looked_for} are read"


def _num_files(count: int, ending: str) -> str:
    files = "file" if count == 1 else "files"
    return f"{count} {files} without ending" if ending == NO_ENDING else f"{count} {ending} {files}"
