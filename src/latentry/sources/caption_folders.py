"""The captions of several folders: a file finds its caption in its own folder, never in another one."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from latentry.sources.captions import CaptionFinder
from latentry.sources.folder import SourceFolders
from latentry.types import Caption


class CaptionFolders:
    """One ``CaptionFinder`` per folder. Each looks up names relative to its folder, and no higher than that.

    Args:
        source: The folders.
        make_finder: Makes the finder of one folder.
    """

    def __init__(self, source: SourceFolders, make_finder: Callable[[Path], CaptionFinder]) -> None:
        self._source = source
        self._finders = [make_finder(root) for root in source.roots]

    def find(self, name: str) -> Caption | None:
        """The captions of a file; None if it has none and gets no other one.

        Args:
            name: The file's name in the source.
        """
        located = self._source.locate(name)
        assert located is not None, f"{name} is in none of the folders"
        number, name_in_folder = located
        return self._finders[number].find(name_in_folder)

    @property
    def required(self) -> bool:
        """Whether a file without a caption is a failure."""
        return self._finders[0].required

    def note_problems_of_lists(self) -> None:
        """Record the entries of lists that cannot be used. Call it after all lookups."""
        for finder in self._finders:
            finder.note_problems_of_lists()

    @property
    def counts(self) -> Counter[str]:
        """How many captions came from each place."""
        return sum((finder.counts for finder in self._finders), Counter[str]())

    @property
    def problems(self) -> Mapping[str, str]:
        """Caption file, or file and line, to the reason why it cannot be used."""
        return ChainMap(*(finder.problems for finder in self._finders))

    @property
    def files_read(self) -> set[str]:
        """The names of all files that were read for captions."""
        return {
            prefix + path.relative_to(root).as_posix()
            for finder, root, prefix in zip(
                self._finders, self._source.roots, self._source.prefixes, strict=True
            )
            for path in finder.files_read
        }
