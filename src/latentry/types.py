"""The few frozen records that cross rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class BucketShape:
    """What makes two samples stack: their size in pixels and, for video, their frames."""

    width: int
    height: int
    aspect_name: str
    """``tall``, ``square`` or ``wide``: part of the bucket's key in the documented interface."""
    num_frames: int | None = None
    """None for images."""

    @property
    def folder(self) -> str:
        """The folder inside a cache that holds this bucket's files."""
        return f"{self.width}x{self.height}"

    @property
    def pixels(self) -> int:
        return self.width * self.height


Bucket: TypeAlias = "tuple[int, int, int | None]"
"""Width, height, and for video the number of frames: what a batch must share."""


def bucket_name(bucket: Bucket) -> str:
    """``832x480``, or ``832x480x81`` with frames."""
    return "x".join(str(part) for part in bucket if part is not None)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input, as the source lists it."""

    name: str
    """Relative to the source, with forward slashes; what identifies the sample."""
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Caption:
    """What a sample is described by, and where that came from."""

    text: str
    source: str
    """``sidecar``, ``txt``, ``jsonl``, ``meta_json`` or ``file name``."""


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """A sample that is to be encoded: everything but its pixels."""

    file: SourceFile
    caption: Caption
    width: int
    """As shown, that is, after the orientation in its header."""
    height: int
    bucket_id: int | None
    """None where the size was given and not chosen."""
    bucket: tuple[int, int]
    num_frames: int | None = None
    """None for images."""
    number: int = 0
    """Which of its file's samples this is."""
    num_samples: int = 1
    """How many samples its file gives."""

    @property
    def name(self) -> str:
        """What identifies the sample among all of its source."""
        return self.file.name if self.num_samples == 1 else f"{self.file.name}#{self.number}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that could not be encoded."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Task:
    """The unit of work: samples of one bucket, encoded and committed together."""

    id: str
    bucket: Bucket
    samples: tuple[PlannedSample, ...]
    retry: bool = False
    """Whether its samples failed before; that they fail again says nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorInfo:
    """What can be said of a processor without loading its model."""

    name: str
    media: tuple[str, ...]
    """``image``, ``video`` or both."""
    model: str
    """The model family, for people."""
    model_type: str
    """What caches made by it carry as ``model_type``."""
    default_model_name: str
    spatial_factor: int
    """Pixels per latent, along each side."""
    temporal_factor: int = 1
    quantum: int = 64
    """Bucket sides are multiples of this."""
    latent_channels: int = 16
    model_version: str = ""
    """The release of the model, for video files, which record it."""
    version: int = 1
    """Goes up when the same inputs would give other numbers."""

    @property
    def frame_rule(self) -> str:
        """Which numbers of frames fit, such as ``4n+1``."""
        if "video" not in self.media:
            return "-"
        return "any" if self.temporal_factor == 1 else f"{self.temporal_factor}n+1"
