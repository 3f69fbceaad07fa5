"""One interface to images and videos: what samples a file has, and the pixels of these samples.

Planning, encoding and committing use this interface only and are the same for images and videos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from latentry.media.content import MediaFile
from latentry.types import PlannedSample, Window


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The samples that a file has, from its header."""

    width: int
    """As shown, after the orientation of the header is applied."""
    height: int
    num_frames: int | None = None
    """Frames per sample; None for images."""
    num_samples: int = 1
    windows: tuple[Window, ...] = ()
    """The parts of a video that become samples, if it is not one sample from its beginning. They may have different
    numbers of frames, so ``num_frames`` is None then."""
    notes: tuple[str, ...] = ()
    """What the user should know about how the file is read, such as ``HDR (PQ), tone-mapped to sRGB``. Texts are
    counted over all inputs, so they name no file."""


@dataclass(frozen=True, slots=True)
class Crop:
    """A sample's pixels, cut to its bucket."""

    pixels: torch.Tensor
    """uint8 [3,H,W], or [3,T,H,W] for video."""
    offset: tuple[int, int]
    """(left, top) of the window in the scaled image."""
    source_frame: int | None = None
    """In frames mode, the number of the frame in its file."""
    damage: str | None = None
    """What the decoder complained about, if the pixels may be wrong, such as ``premature end of JPEG data``."""


class MediaReader(Protocol):
    """Reads the files of one type of media. A ``MediaError`` says why a file cannot be used."""

    @property
    def suffixes(self) -> frozenset[str]:
        """The file name extensions, in lower case and with the dot."""

    def probe(self, path: Path) -> ProbeResult:
        """Read the header of a file."""

    def load(self, path: Path) -> MediaFile:
        """Read a file once, for its digest and for ``read``."""

    def read(self, file: MediaFile, samples: Sequence[PlannedSample], seed: int) -> Sequence[Crop | str]:
        """Decode samples of one file and cut them to their buckets. ``seed`` decides random crops.

        A text instead of a sample says why this one cannot be decoded.
        """
