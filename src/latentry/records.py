"""The few frozen records that cross rooms."""

from __future__ import annotations

from dataclasses import dataclass


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
    bucket_id: int
    bucket: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that could not be encoded."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Task:
    """The unit of work: samples of one bucket, encoded and committed together."""

    id: str
    bucket: tuple[int, int]
    samples: tuple[PlannedSample, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """What became of a task: rows for the metadata, and what failed."""

    task_id: str
    rows: tuple[dict[str, object], ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorInfo:
    """What can be said of a processor without loading its model."""

    name: str
    media: str
    """``image`` or ``video``."""
    model: str
    """The model family, for people."""
    model_type: str
    """What caches made by it carry as ``model_type``."""
    default_model_name: str
    spatial_factor: int
    """Pixels per latent, along each side."""
    temporal_factor: int = 1
    frame_rule: str = "-"
    """Which numbers of frames fit, such as ``4n+1``."""
    quantum: int = 64
    """Bucket sides are multiples of this."""
    version: int = 1
    """Goes up when the same inputs would give other numbers."""
