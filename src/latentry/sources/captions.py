"""What each picture is described by: beside it, in a list, or its own name.

A caption belongs to a path, never to a base name: two ``cat.jpg`` in two folders keep their own. A
file that does not parse, or an entry without the field, is noted once and the next source is asked;
no caption problem ever stops a run.
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
_NOT_CAPTIONS = ("failures.jsonl",)  # our own, where a cache lies in its source's folder


class CaptionFinder:
    """Finds the caption of a file in a folder, and keeps count of where captions came from.

    >>> finder = CaptionFinder(Path("photos"))
    >>> finder.find("trips/red_car.jpg")
    Caption(text='red car', source='file name')

    ``field`` is the key to look under everywhere; without it, ``caption`` in JSON files and
    ``lines_field`` in JSON-lines files.
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
        self.problems: dict[str, str] = {}
        """The caption files that are of no use, each with the reason."""

    def find(self, name: str) -> Caption:
        """The caption of the file with this name relative to the root."""
        for source, look_up in self._lookups:
            text = look_up(name)
            if text is not None:
                self.counts[source] += 1
                return Caption(text, source)
        self.counts["file name"] += 1
        return Caption(PurePosixPath(name).stem.replace("_", " "), "file name")

    def _names_in(self, folder: str) -> frozenset[str]:
        """What a folder holds, listed once: a million pictures then cost no look at files that are not there."""
        if folder not in self._names:
            try:
                self._names[folder] = frozenset(os.listdir(self._root / folder))
            except OSError:
                self._names[folder] = frozenset()
        return self._names[folder]

    def _file(self, folder: str, name: str) -> Path | None:
        """The file of this name in a folder, if there is one."""
        if name not in self._names_in(folder):
            return None
        path = self._root / folder / name
        return path if path.is_file() else None

    # ---- beside the picture -----------------------------------------------------------------

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

    # ---- in a list --------------------------------------------------------------------------

    def _from_lines(self, name: str) -> str | None:
        """From the ``.jsonl`` files of the picture's folder, then of the folders above it."""
        for folder, within in _folders_above(name):
            for file in self._lists_in(folder, within):
                entry = self._list(file, self._lines_field, _json_lines).get(within)
                if entry is not None:
                    return str(entry)
        return None

    def _lists_in(self, folder: str, within: str) -> Iterator[Path]:
        if folder not in self._line_files:
            names = sorted(name for name in self._names_in(folder) if name.endswith(".jsonl"))
            files = [self._file(folder, name) for name in names if name not in _NOT_CAPTIONS]
            self._line_files[folder] = [file for file in files if file is not None]
        yield from self._line_files[folder]
        if "_sample" in within and "/" not in within:
            shared = self._file(folder, f"{within.rpartition('_sample')[0]}_internvl.json")
            if shared is not None:
                yield shared

    def _from_meta_json(self, name: str) -> str | None:
        for folder, within in _folders_above(name):
            file = self._file(folder, "meta.json")
            if file is not None:
                entry = self._list(file, self._json_field, _json_items).get(within)
                if entry is not None:
                    return str(entry)
        return None

    def _list(
        self, file: Path, field: str, entries_of: Callable[[str], Iterator[tuple[str, Any]]]
    ) -> dict[str, str]:
        """Name to caption of a list file, read once."""
        if file not in self._lists:
            captions: dict[str, str] = {}
            try:
                for where, entry in entries_of(self._read_text(file) or ""):
                    name = _name_of(entry)
                    text = self._field_of(entry, field, f"{file}, {where}") if name else None
                    if name is None:
                        self._note(f"{file}, {where}", f"has none of {', '.join(_NAME_FIELDS)}")
                    elif text is not None:
                        captions[name] = text
            except ValueError as error:
                self._note(file, str(error))
            self._lists[file] = captions
        return self._lists[file]

    # ---- reading ----------------------------------------------------------------------------

    def _field_of(self, entry: Any, field: str, where: Path | str) -> str | None:
        value = entry.get(field) if isinstance(entry, dict) else None
        if not (isinstance(value, str) and value.strip()):
            self._note(where, f"has no text under {field!r}")
            return None
        try:
            value.encode()
        except UnicodeEncodeError:
            self._note(where, f"has half a character under {field!r}")
            return None
        return value.strip()

    def _read_text(self, file: Path) -> str | None:
        try:
            return file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self._note(file, f"cannot be read: {error}")
            return None

    def _note(self, where: Path | str, problem: str) -> None:
        self.problems.setdefault(str(where), problem)


def _folders_above(name: str) -> Iterator[tuple[str, str]]:
    """The file's folder and those above it, up to the root, each with the file's name within it."""
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
    """The entries of a file with one JSON object a line; a whole-file JSON list is taken too."""
    if text.lstrip().startswith("["):
        yield from _json_items(text)
        return
    for number, line in enumerate(text.split("\n"), start=1):  # other line ends may stand inside a caption
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
        raise ValueError("holds no list of entries (at the top, or under 'items' or 'data')")
    for number, entry in enumerate(content):
        yield f"entry {number}", entry
