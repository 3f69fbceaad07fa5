"""How often an epoch has each sample: once, or as often as the user repeats its folder.

Repeated rows share the sample's data. So a change of repeats encodes nothing, and takes no space.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from latentry.cache.format import Row
from latentry.counted import counted
from latentry.errors import ConfigError
from latentry.sources.folder import SourceFolders


@dataclass(frozen=True, slots=True)
class Repeats:
    """The repeats of a run's folders."""

    source: SourceFolders
    per_folder: tuple[int, ...]

    @classmethod
    def of(cls, source: SourceFolders, repeats: int | Sequence[int] | None) -> Repeats:
        """One number for each folder: the same for all, or as listed."""
        count = len(source.roots)
        if repeats is None or isinstance(repeats, int):
            numbers: tuple[int, ...] = (1 if repeats is None else repeats,) * count
        else:
            numbers = tuple(repeats)
        if len(numbers) != count:
            raise ConfigError(
                f"repeats has {counted(len(numbers), 'number')} for {counted(count, 'folder')}; "
                "give one for each folder"
            )
        for number in numbers:
            if number < 1:
                raise ConfigError(
                    f"repeats is {number}; it must be at least 1 (leave out the folder instead)"
                )
        return cls(source, numbers)

    def number(self, source_name: str, held: int = 1) -> int:
        """How often an epoch has the samples of this input.

        Args:
            source_name: The name of the input.
            held: How often the cache has it, which stays if the input is in none of this run's folders.
        """
        located = self.source.locate(source_name)
        return held if located is None else self.per_folder[located[0]]

    def expand(self, rows: Iterable[Row]) -> list[Row]:
        """All rows, each as often as it is repeated: first every sample once, then the further ones."""
        repeated = (
            msgspec.structs.replace(row, repeat=repeat)
            for row in rows
            for repeat in range(self.number(row.source_name, row.repeat + 1))
        )
        return sorted(repeated, key=lambda row: (row.repeat, row.source_name, row.number))
