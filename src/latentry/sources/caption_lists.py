"""Lists of captions: ``.jsonl`` files, ``metadata.csv`` and ``meta.json``, which name the files they describe.

Names are compared as people write them: with either slash, absolute or relative to the list's folder, and in any
Unicode composition. A list is read once, and only its captions are kept.
"""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

_NAME_FIELDS = ("file_name", "filename")
_PLURALS = {"has": "have", "is": "are"}

Note = Callable[[Path | str, str], None]
"""Records a problem: where it is, and what it is."""
Entries = Iterator[tuple[str, Any]]
"""Entries of a list, each with its position for messages."""


class InvalidEntry(ValueError):
    """Stands for an entry that cannot be parsed, and says why."""


class Texts(NamedTuple):
    """The captions of one entry."""

    texts: tuple[str, ...]
    under_default_key: bool
    """Whether the entry lacks the keys that the user named."""


@dataclass(frozen=True, slots=True)
class CaptionKeys:
    """Under which keys an entry has its captions."""

    named: tuple[str, ...]
    """The keys that the user named. The captions under all of them are taken."""
    defaults: tuple[str, ...]
    """Where captions are otherwise. The first key that has one is taken."""

    def texts_of(self, entry: Any, where: Path | str, note: Note) -> Texts | None:
        """The captions of an entry; None, and a problem, if it has none."""
        fields = entry if isinstance(entry, dict) else {}
        found = [text for key in self.named for text in _usable(fields.get(key), key, where, note)]
        if found:
            return Texts(tuple(dict.fromkeys(found)), False)
        for key in self.defaults:
            if texts := _usable(fields.get(key), key, where, note):
                if self.named:
                    note(where, f"has no text under {_either(self.named)}, only under {key!r}")
                return Texts(tuple(dict.fromkeys(texts)), bool(self.named))
        note(where, f"has no text under {_either(self.named or self.defaults)}")
        return None


def _either(keys: tuple[str, ...]) -> str:
    quoted = [repr(key) for key in keys]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _usable(value: Any, key: str, where: Path | str, note: Note) -> list[str]:
    """The captions in a value, which is a text or a list of texts."""
    texts = []
    for text in value if isinstance(value, list) else [value]:
        if not (isinstance(text, str) and text.strip()):
            continue
        try:
            text.encode()
        except UnicodeEncodeError:
            note(where, f"has an incomplete character (an unpaired surrogate) under {key!r}")
            continue
        texts.append(text.strip())
    return texts


class CaptionList:
    """The captions in one file that names the files they describe.

    Args:
        file: The list.
        content: Its text.
        keys: Where an entry has its captions.
        entries_of: Splits the text into entries; a ``ValueError`` says why it cannot.
        note: Records problems.
        nameless: Whether entries without a name are for the one file that the list belongs to.
    """

    def __init__(
        self,
        file: Path,
        content: str,
        keys: CaptionKeys,
        entries_of: Callable[[str], Entries],
        note: Note,
        *,
        nameless: bool = False,
    ) -> None:
        self.file = file
        self._captions: dict[str, Texts] = {}
        self._unused: dict[str, str] = {}
        self._problems: dict[str, list[tuple[str, str | None]]] = {}
        """Reason to the entries that it concerns: position and comparable name."""
        self.nameless: Texts | None = None
        """The captions of an entry without a name."""
        try:
            for position, entry in entries_of(content):
                self._add(position, entry, keys, nameless)
        except ValueError as error:
            note(file, str(error))

    def _add(self, position: str, entry: Any, keys: CaptionKeys, nameless: bool) -> None:
        name = _name_of(entry)
        comparable = None if name is None else name_in_folder(name, self.file.parent)
        problems: list[str] = []
        texts = None
        if isinstance(entry, InvalidEntry):
            problems.append(str(entry))
        elif name is None and not (nameless and isinstance(entry, dict)):
            problems.append(f"has neither {' nor '.join(_NAME_FIELDS)}")
        else:
            texts = keys.texts_of(entry, position, lambda _, problem: problems.append(problem))
        for problem in problems[:1]:
            self._problems.setdefault(problem, []).append((position, comparable))
        if comparable is not None and name is not None:
            self._unused[comparable] = name
            if texts is not None:
                self._captions[comparable] = texts
        elif texts is not None and self.nameless is None:
            self.nameless = texts

    def find(self, name: str) -> Texts | None:
        """The captions of a file, named relative to the list's folder."""
        comparable = comparable_name(name)
        self._unused.pop(comparable, None)
        return self._captions.get(comparable)

    def note_problems(self, exists: Callable[[str], bool], note: Note) -> None:
        """Record what is wrong with the entries, once for each reason. Call it after all lookups.

        Args:
            exists: Whether the list's folder has a file of this name. Of an entry without a file, nothing else is said.
            note: Records problems.
        """
        missing = {name: written for name, written in self._unused.items() if not exists(name)}
        for problem, entries in self._problems.items():
            positions = [position for position, name in entries if name not in missing]
            if len(positions) == 1:
                note(f"{self.file}, {positions[0]}", problem)
            elif positions:
                verb, _, rest = problem.partition(" ")
                note(
                    f"{self.file}, {positions[0]} and {len(positions) - 1} more",
                    f"{_PLURALS[verb]} {rest}",
                )
        if missing:
            entries_are = "1 entry" if len(missing) == 1 else f"{len(missing)} entries"
            first = next(iter(missing.values()))
            note(self.file, f"has {entries_are} for which there is no file, such as {first!r}")


def comparable_name(name: str) -> str:
    """A name in composed Unicode: file systems and tools write ``é`` as one character or as two."""
    return unicodedata.normalize("NFC", name)


def name_in_folder(name: str, folder: Path) -> str:
    """The name in an entry, relative to the list's folder. A name outside of the folder stays as it is."""
    name = posixpath.normpath(name.replace("\\", "/"))
    if name.startswith("/"):
        parent, _, base = name.rpartition("/")
        inside = os.path.relpath(_real_folder(parent or "/"), _real_folder(str(folder))).replace(os.sep, "/")
        if inside != ".." and not inside.startswith("../"):
            name = base if inside == "." else f"{inside}/{base}"
    return comparable_name(name)


@lru_cache(maxsize=1 << 12)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _name_of(entry: Any) -> str | None:
    if isinstance(entry, dict):
        for field in _NAME_FIELDS:
            if isinstance(entry.get(field), str) and entry[field]:
                return str(entry[field])
    return None


# ---- the kinds of lists ---------------------------------------------------------------------


def json_lines(text: str) -> Entries:
    """The entries of a file with one JSON object per line. A file that is one JSON list is accepted too."""
    if text.lstrip().startswith("["):
        yield from json_items(text)
        return
    for number, line in enumerate(
        text.split("\n"), start=1
    ):  # not splitlines(): captions may contain other line separators
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                why = error.msg if isinstance(error, json.JSONDecodeError) else error
                yield f"line {number}", InvalidEntry(f"is not valid JSON: {why}")


def json_object_or_lines(text: str) -> Entries:
    """The entries of a file that is one JSON object, a JSON list, or one JSON object per line."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and _list_in(content) is None:
        yield "entry 1", content
    else:
        yield from json_items(text) if content is not None else json_lines(text)


def json_items(text: str) -> Entries:
    """The entries of a JSON list, or of the list under ``items`` or ``data``."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    entries = _list_in(content) if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise ValueError("has no list of entries (at the top level, or under 'items' or 'data')")
    for number, entry in enumerate(entries, start=1):
        yield f"entry {number}", entry


def json_items_if_any(text: str) -> Entries:
    """Like ``json_items``, but a file that is valid JSON without a list of entries is not a problem."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = []
    if isinstance(content, list) or (isinstance(content, dict) and _list_in(content) is not None):
        yield from json_items(text)


def _list_in(content: dict[str, Any]) -> list[Any] | None:
    return next((content[key] for key in ("items", "data") if isinstance(content.get(key), list)), None)


def csv_rows(text: str) -> Entries:
    """The rows of a table whose first line names its columns."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        columns = [column.strip() for column in reader.fieldnames or ()]
        if not set(_NAME_FIELDS) & set(columns):
            separated = any(mark in column for column in columns for mark in ";\t")
            hint = "; separate the columns with commas" if separated else ""
            raise ValueError(f"has no column {' or '.join(_NAME_FIELDS)} in its first line{hint}")
        reader.fieldnames = columns
        for row in reader:
            yield f"line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"is not a valid CSV table: {error}") from None
