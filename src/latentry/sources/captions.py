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
from functools import partial
from pathlib import Path, PurePosixPath

from latentry.errors import ConfigError
from latentry.sources.caption_lists import (
    CaptionKeys,
    CaptionList,
    Entries,
    Texts,
    csv_rows,
    json_items,
    json_items_if_any,
    json_lines,
    json_object_or_lines,
)
from latentry.sources.folder_names import FolderNames
from latentry.types import Caption

CAPTION_FORMATS = ("auto", "sidecar", "txt", "jsonl", "csv", "meta_json")
_AUTO_ORDER = ("sidecar", "txt", "jsonl", "csv", "meta_json")
CAPTION_FALLBACKS = ("filename", "empty", "skip")
"""What an input without a caption gets: its name, an empty caption, or no place in the cache."""
NO_CAPTION = "has no caption"
"""Why an input without a caption is a failure, or left out."""
_TEXT_ENDINGS = (".txt", ".caption")
_NOT_CAPTIONS = ("failures.jsonl",)  # written by a run whose output is inside its input folder


class CaptionFinder:
    """Finds the captions of the files in a folder, and counts where they came from.

    >>> finder = CaptionFinder(Path("photos"))
    >>> finder.find("trips/red_car.jpg")
    Caption(text='red car', source='file name', more=())

    Args:
        root: The folder.
        caption_format: One of ``CAPTION_FORMATS``. ``auto`` tries all others in that order; every other value tries
            that source only.
        field: The key of the caption in all files with keys, or several keys separated by commas. None means
            ``caption`` in JSON files, and ``lines_field``, ``caption`` or ``text`` in ``.jsonl`` and ``.csv`` files.
            These are also tried last if no source has the named keys.
        lines_field: The first key to try in ``.jsonl`` and ``.csv`` files.
        fallback: One of ``CAPTION_FALLBACKS``, for a file without a caption.
        required: Give a file without a caption no other one, whatever ``fallback`` says.
        prefix: Put before every caption, as it is.
        suffix: Put after every caption, as it is.
        lines: Take each line of a text file as a caption.
    """

    def __init__(
        self,
        root: Path,
        caption_format: str = "auto",
        field: str | None = None,
        lines_field: str = "internvl",
        *,
        fallback: str = "filename",
        required: bool = False,
        prefix: str = "",
        suffix: str = "",
        lines: bool = False,
    ) -> None:
        for what, value, allowed in (
            ("caption_format", caption_format, CAPTION_FORMATS),
            ("caption_fallback", fallback, CAPTION_FALLBACKS),
        ):
            if value not in allowed:
                raise ConfigError(f"unknown {what} {value!r}; choose one of {', '.join(allowed)}")
        self._root = root
        named = tuple(key.strip() for key in field.split(",") if key.strip()) if field else ()
        self._json_keys = CaptionKeys(named, ("caption",))
        self._list_keys = CaptionKeys(named, tuple(dict.fromkeys((lines_field, "caption", "text"))))
        lookups: dict[str, Callable[[str], Texts | None]] = {
            "sidecar": self._from_sidecar_json,
            "txt": self._from_sidecar_text,
            "jsonl": self._from_lines,
            "csv": self._from_csv,
            "meta_json": self._from_meta_json,
        }
        order = _AUTO_ORDER if caption_format == "auto" else (caption_format,)
        self._lookups = [(name, lookups[name]) for name in order]
        self._meta_entries = json_items_if_any if caption_format == "auto" else json_items
        self._fallback = "skip" if required else fallback
        self.required = required
        """Whether a file without a caption is a failure."""
        self._prefix, self._suffix, self._by_line = prefix, suffix, lines
        self._lists: dict[Path, CaptionList] = {}
        self._line_files: dict[str, list[Path]] = {}
        self._folders: dict[str, FolderNames] = {}
        self.counts: Counter[str] = Counter()
        """How many captions came from each source."""
        self.problems: dict[str, str] = {}
        """Caption file, or file and line, to the reason why it cannot be used."""
        self.files_read: set[Path] = set()
        """All files that were read for captions."""

    def find(self, name: str) -> Caption | None:
        """The captions of a file; None if it has none and gets no other one.

        Args:
            name: The file's path relative to the folder, with forward slashes.
        """
        elsewhere: tuple[str, Texts] | None = None
        for source, look_up in self._lookups:
            found = look_up(name)
            if found is not None and not found.under_default_key:
                return self._caption(found.texts, source)
            if found is not None and elsewhere is None:
                elsewhere = source, found
        if elsewhere is not None:
            source, found = elsewhere
            return self._caption(found.texts, source)
        if self._fallback == "filename":
            return self._caption((PurePosixPath(name).stem.replace("_", " "),), "file name")
        return self._caption(("",), "empty") if self._fallback == "empty" else None

    def _caption(self, texts: tuple[str, ...], source: str) -> Caption:
        self.counts[source] += 1
        first, *more = (f"{self._prefix}{text}{self._suffix}" for text in texts)
        return Caption(first, source, tuple(more))

    def note_problems_of_lists(self) -> None:
        """Record the entries of lists that cannot be used. Call it after all lookups."""
        for listed in self._lists.values():
            listed.note_problems(partial(self._exists, listed.file.parent), self._note)

    def _exists(self, folder: Path, name: str) -> bool:
        """Whether a folder of a list has a file of this name, which may be in a subfolder."""
        parent, _, base = os.path.relpath(folder / name, self._root).replace(os.sep, "/").rpartition("/")
        return not name.startswith(("/", "../")) and self._names_in(parent).has(base)

    def _names_in(self, folder: str) -> FolderNames:
        if folder not in self._folders:
            self._folders[folder] = FolderNames(self._root / folder)
        return self._folders[folder]

    # ---- beside the file --------------------------------------------------------------------

    def _sidecar(self, name: str, suffix: str) -> Path | None:
        folder, _, base = name.rpartition("/")
        return self._names_in(folder).file(os.path.splitext(base)[0] + suffix)

    def _from_sidecar_json(self, name: str) -> Texts | None:
        sidecar = self._sidecar(name, ".json")
        if sidecar is None:
            return None
        try:
            content = json.loads(self._read_text(sidecar) or "")
        except (ValueError, RecursionError) as error:
            self._note(sidecar, f"is not valid JSON: {error}")
            return None
        return self._json_keys.texts_of(content, sidecar, self._note)

    def _from_sidecar_text(self, name: str) -> Texts | None:
        for ending in _TEXT_ENDINGS:
            sidecar = self._sidecar(name, ending)
            text = None if sidecar is None else self._read_text(sidecar)
            if text is not None:
                lines = [line.strip() for line in text.split("\n")] if self._by_line else [text.strip()]
                return Texts(tuple(dict.fromkeys(filter(None, lines))) or ("",), False)
        return None

    # ---- in a list of captions --------------------------------------------------------------

    def _from_lines(self, name: str) -> Texts | None:
        """Look in the ``.jsonl`` files of the file's folder, then of the folders above it."""
        for folder, name_in_folder in _folders_above(name):
            for file in self._line_files_in(folder):
                found = self._list(file, self._list_keys, json_lines).find(name_in_folder)
                if found is not None:
                    return found
            if "/" not in name_in_folder:
                found = self._from_internvl(folder, name_in_folder)
                if found is not None:
                    return found
        return None

    def _line_files_in(self, folder: str) -> list[Path]:
        if folder not in self._line_files:
            files = self._names_in(folder).files_ending_in(".jsonl")
            self._line_files[folder] = [file for file in files if file.name not in _NOT_CAPTIONS]
        return self._line_files[folder]

    def _from_internvl(self, folder: str, name: str) -> Texts | None:
        """Look in ``cat_internvl.json`` for ``cat.jpg``, and in ``set1_internvl.json`` for ``set1_sample7.jpg``."""
        stem = os.path.splitext(name)[0]
        for prefix in dict.fromkeys((stem, *([name.rpartition("_sample")[0]] if "_sample" in name else []))):
            file = self._names_in(folder).file(f"{prefix}_internvl.json")
            if file is not None:
                own = prefix == stem
                listed = self._list(file, self._list_keys, json_object_or_lines, nameless=own)
                found = listed.find(name) or (listed.nameless if own else None)
                if found is not None:
                    return found
        return None

    def _from_csv(self, name: str) -> Texts | None:
        return self._from_list_named("metadata.csv", name, self._list_keys, csv_rows)

    def _from_meta_json(self, name: str) -> Texts | None:
        return self._from_list_named("meta.json", name, self._json_keys, self._meta_entries)

    def _from_list_named(
        self, file_name: str, name: str, keys: CaptionKeys, entries_of: Callable[[str], Entries]
    ) -> Texts | None:
        """Look in the list of this name in the file's folder, then in the folders above it."""
        for folder, name_in_folder in _folders_above(name):
            file = self._names_in(folder).file(file_name)
            found = None if file is None else self._list(file, keys, entries_of).find(name_in_folder)
            if found is not None:
                return found
        return None

    def _list(
        self,
        file: Path,
        keys: CaptionKeys,
        entries_of: Callable[[str], Entries],
        *,
        nameless: bool = False,
    ) -> CaptionList:
        """A list of captions, read once."""
        if file not in self._lists:
            content = self._read_text(file)
            entries = entries_of if content is not None else (lambda _: iter(()))
            self._lists[file] = CaptionList(file, content or "", keys, entries, self._note, nameless=nameless)
        return self._lists[file]

    # ---- reading ----------------------------------------------------------------------------

    def _read_text(self, file: Path) -> str | None:
        self.files_read.add(file)
        try:
            return file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            self._note(file, "is not UTF-8 text; save it as UTF-8")
            return None
        except OSError as error:
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
