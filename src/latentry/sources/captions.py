"""Captions: from a file beside the image or video, from a list of captions, or from its name.

A caption belongs to a path, not to a base name: two ``cat.jpg`` in two folders have their own captions. A caption file
that does not parse, or an entry without the caption's key, is recorded once as a problem and the next source is tried.
Caption problems never stop a run.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from latentry.errors import ConfigError
from latentry.types import Caption

CAPTION_FORMATS = ("auto", "sidecar", "txt", "jsonl", "meta_json")
_AUTO_ORDER = ("sidecar", "txt", "jsonl")
_NAME_FIELDS = ("file_name", "filename")
_NOT_CAPTIONS = ("failures.jsonl",)  # written by a run whose output is inside its input folder


class CaptionFinder:
    """Finds the captions of the files in a folder, and counts where they came from.

    >>> finder = CaptionFinder(Path("photos"))
    >>> finder.find("trips/red_car.jpg")
    Caption(text='red car', source='file name')

    Args:
        root: The folder.
        caption_format: One of ``CAPTION_FORMATS``. ``auto`` tries ``sidecar``, ``txt`` and ``jsonl``, in that
            order; every other value tries that source only. The last resort is always the file name.
        field: The key of the caption in all JSON files. None means ``caption``, or ``lines_field`` in
            ``.jsonl`` files.
        lines_field: The key of the caption in ``.jsonl`` files if ``field`` is None.
    """

    def __init__(
        self,
        root: Path,
        caption_format: str = "auto",
        field: str | None = None,
        lines_field: str = "internvl",
    ) -> None:
        if caption_format not in CAPTION_FORMATS:
            raise ConfigError(
                f"unknown caption_format {caption_format!r}; choose one of {', '.join(CAPTION_FORMATS)}"
            )
        self._root = root
        self._json_field = field or "caption"
        self._lines_field = field or lines_field
        lookups: dict[str, Callable[[str], str | None]] = {
            "sidecar": self._from_sidecar_json,
            "txt": self._from_sidecar_text,
            "jsonl": self._from_lines,
            "meta_json": self._from_meta_json,
        }
        order = _AUTO_ORDER if caption_format == "auto" else (caption_format,)
        self._lookups = [(name, lookups[name]) for name in order]
        self._lists: dict[Path, dict[str, Any]] = {}
        self._line_files: dict[str, list[Path]] = {}
        self._names: dict[str, frozenset[str]] = {}
        self.counts: Counter[str] = Counter()
        """How many captions came from each source."""
        self.problems: dict[str, str] = {}
        """Caption file, or file and line, to the reason why it cannot be used."""
        self.files_read: set[Path] = set()
        """All files that were read for captions."""

    def find(self, name: str) -> Caption:
        """The caption of a file.

        Args:
            name: The file's path relative to the root, with forward slashes.
        """
        for source, look_up in self._lookups:
            text = look_up(name)
            if text is not None:
                self.counts[source] += 1
                return Caption(text, source)
        self.counts["file name"] += 1
        return Caption(PurePosixPath(name).stem.replace("_", " "), "file name")

    def _names_in(self, folder: str) -> frozenset[str]:
        """The names in a folder. Listed once, so that a million files cost no lookups of absent sidecars."""
        if folder not in self._names:
            try:
                self._names[folder] = frozenset(os.listdir(self._root / folder))
            except OSError:
                self._names[folder] = frozenset()
        return self._names[folder]

    def _file(self, folder: str, name: str) -> Path | None:
        """The path of a regular file in a folder, or None if there is none of this name."""
        if name not in self._names_in(folder):
            return None
        path = self._root / folder / name
        return path if path.is_file() else None

    # ---- beside the file --------------------------------------------------------------------

    def _sidecar(self, name: str, suffix: str) -> Path | None:
        folder, _, base = name.rpartition("/")
        return self._file(folder, os.path.splitext(base)[0] + suffix)

    def _from_sidecar_json(self, name: str) -> str | None:
        sidecar = self._sidecar(name, ".json")
        if sidecar is None:
            return None
        try:
            content = json.loads(self._read_text(sidecar) or "")
        except (ValueError, RecursionError) as error:
            self._note(sidecar, f"is not valid JSON: {error}")
            return None
        return self._field_of(content, self._json_field, sidecar)

    def _from_sidecar_text(self, name: str) -> str | None:
        sidecar = self._sidecar(name, ".txt")
        if sidecar is None:
            return None
        text = self._read_text(sidecar)
        if text is not None and not text.strip():
            self._note(sidecar, "is empty")
        return text.strip() or None if text else None

    # ---- in a list of captions --------------------------------------------------------------

    def _from_lines(self, name: str) -> str | None:
        """Look in the ``.jsonl`` files of the file's folder, then of the folders above it."""
        for folder, name_in_folder in _folders_above(name):
            for file in self._lists_in(folder, name_in_folder):
                entry = self._list(file, self._lines_field, _json_lines).get(name_in_folder)
                if entry is not None:
                    return str(entry)
        return None

    def _lists_in(self, folder: str, name_in_folder: str) -> Iterator[Path]:
        """The caption lists of a folder: its ``.jsonl`` files, then ``<prefix>_internvl.json``."""
        if folder not in self._line_files:
            names = sorted(name for name in self._names_in(folder) if name.endswith(".jsonl"))
            files = [self._file(folder, name) for name in names if name not in _NOT_CAPTIONS]
            self._line_files[folder] = [file for file in files if file is not None]
        yield from self._line_files[folder]
        if "_sample" in name_in_folder and "/" not in name_in_folder:
            shared = self._file(folder, f"{name_in_folder.rpartition('_sample')[0]}_internvl.json")
            if shared is not None:
                yield shared

    def _from_meta_json(self, name: str) -> str | None:
        for folder, name_in_folder in _folders_above(name):
            file = self._file(folder, "meta.json")
            if file is not None:
                entry = self._list(file, self._json_field, _json_items).get(name_in_folder)
                if entry is not None:
                    return str(entry)
        return None

    def _list(
        self, file: Path, field: str, entries_of: Callable[[str], Iterator[tuple[str, Any]]]
    ) -> dict[str, str]:
        """Name to caption for a list of captions, read once."""
        if file not in self._lists:
            captions: dict[str, str] = {}
            try:
                for position, entry in entries_of(self._read_text(file) or ""):
                    name = _name_of(entry)
                    text = self._field_of(entry, field, f"{file}, {position}") if name else None
                    if name is None:
                        self._note(f"{file}, {position}", f"has neither {' nor '.join(_NAME_FIELDS)}")
                    elif text is not None:
                        captions[name] = text
            except ValueError as error:
                self._note(file, str(error))
            self._lists[file] = captions
        return self._lists[file]

    # ---- reading ----------------------------------------------------------------------------

    def _field_of(self, entry: Any, field: str, where: Path | str) -> str | None:
        """The caption under a key of an entry; None, and a problem, if there is no usable text."""
        value = entry.get(field) if isinstance(entry, dict) else None
        if not (isinstance(value, str) and value.strip()):
            self._note(where, f"has no text under {field!r}")
            return None
        try:
            value.encode()
        except UnicodeEncodeError:
            self._note(where, f"has an incomplete character (an unpaired surrogate) under {field!r}")
            return None
        return value.strip()

    def _read_text(self, file: Path) -> str | None:
        self.files_read.add(file)
        try:
            return file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self._note(file, f"cannot be read: {error}")
            return None

    def _note(self, where: Path | str, problem: str) -> None:
        self.problems.setdefault(str(where), problem)


def _folders_above(name: str) -> Iterator[tuple[str, str]]:
    """The file's folder and the folders above it up to the root, each with the file's path relative to it."""
    folder = name
    while folder:
        folder = folder.rpartition("/")[0]
        yield folder, name[len(folder) + 1 :] if folder else name


def _name_of(entry: Any) -> str | None:
    if isinstance(entry, dict):
        for field in _NAME_FIELDS:
            if isinstance(entry.get(field), str):
                return PurePosixPath(entry[field].replace("\\", "/")).as_posix()
    return None


def _json_lines(text: str) -> Iterator[tuple[str, Any]]:
    """The entries of a file with one JSON object per line. A file that is one JSON list is accepted too."""
    if text.lstrip().startswith("["):
        yield from _json_items(text)
        return
    for number, line in enumerate(
        text.split("\n"), start=1
    ):  # not splitlines(): captions may contain other line separators
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                yield f"line {number} ({error})", None


def _json_items(text: str) -> Iterator[tuple[str, Any]]:
    """The entries of a JSON list, or of the list under ``items`` or ``data``."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if isinstance(content, dict):
        content = next(
            (content[key] for key in ("items", "data") if isinstance(content.get(key), list)), None
        )
    if not isinstance(content, list):
        raise ValueError("has no list of entries (at the top level, or under 'items' or 'data')")
    for number, entry in enumerate(content):
        yield f"entry {number}", entry
