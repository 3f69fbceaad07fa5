"""Caption loaders: Latentry's caption finder, one class for each format.

A loader looks in the folder of each file, and in nothing else. It returns only the captions that it found; the caller
chooses what the other files get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from latentry.errors import ConfigError
from latentry.sources.captions import CaptionFinder


@dataclass(slots=True)
class CaptionLoadingStats:
    """How many files have a caption."""

    total_files: int = 0
    captions_found: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    """Caption file, or file and line, to the reason why it cannot be used."""

    @property
    def captions_missing(self) -> int:
        return self.total_files - self.captions_found


class CaptionLoader:
    """Loads the captions of media files."""

    caption_format: ClassVar[str]
    """The format's name, as ``--caption_format`` takes it."""

    def __init__(self) -> None:
        self.stats = CaptionLoadingStats()
        """About the last call of ``load_captions``."""

    def load_captions(
        self, media_files: Sequence[str | Path], caption_field: str = "caption"
    ) -> Mapping[str, str]:
        """File name to caption, for the files that have one."""
        paths = [Path(file).absolute() for file in media_files]
        finders = {
            folder: CaptionFinder(folder, self.caption_format, caption_field, caption_field)
            for folder in {path.parent for path in paths}
        }
        captions: dict[str, str] = {}
        owners: dict[str, Path] = {}
        for path in paths:
            if owners.setdefault(path.name, path) != path:
                raise ConfigError(
                    f"{owners[path.name]} and {path} have the same name; load the captions of each folder separately"
                )
            caption = finders[path.parent].find(path.name)
            if caption is not None and caption.source == self.caption_format:
                captions[path.name] = caption.text
        problems = {key: text for finder in finders.values() for key, text in finder.problems.items()}
        self.stats = CaptionLoadingStats(len(paths), len(captions), problems)
        return captions


class JSONSidecarCaptionLoader(CaptionLoader):
    """A ``.json`` file beside each media file."""

    caption_format = "sidecar"


class MetaJSONCaptionLoader(CaptionLoader):
    """One ``meta.json`` in the folder of the media files."""

    caption_format = "meta_json"


class JSONLCaptionLoader(CaptionLoader):
    """The ``.jsonl`` files in the folder of the media files."""

    caption_format = "jsonl"


_LOADERS = {
    loader.caption_format: loader
    for loader in (JSONSidecarCaptionLoader, MetaJSONCaptionLoader, JSONLCaptionLoader)
}


def get_caption_loader(caption_format: str) -> CaptionLoader:
    """The loader for ``sidecar``, ``meta_json`` or ``jsonl``."""
    if caption_format not in _LOADERS:
        raise ConfigError(f"unknown caption_format {caption_format!r}; choose one of {', '.join(_LOADERS)}")
    return _LOADERS[caption_format]()
