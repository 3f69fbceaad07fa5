"""The frozen records that cross parts: buckets, inputs, captions, samples, failures, tasks, processors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Bucket(NamedTuple):
    """The shape that a sample is cut to. All samples of a batch share it."""

    width: int
    """In pixels."""
    height: int
    """In pixels."""
    num_frames: int | None = None
    """None for images."""

    @property
    def resolution(self) -> tuple[int, int]:
        """(width, height)."""
        return self.width, self.height

    @property
    def name(self) -> str:
        """``832x480``, or ``832x480x81`` with frames."""
        return "x".join(str(part) for part in self if part is not None)

    @property
    def folder(self) -> str:
        """The name of the bucket's folder in a cache, such as ``832x480``."""
        return f"{self.width}x{self.height}"

    @property
    def pixels(self) -> int:
        """Pixels of one frame."""
        return self.width * self.height


@dataclass(frozen=True, slots=True)
class BucketKey:
    """A bucket and the name of its aspect ratio: what datasets group samples by."""

    width: int
    height: int
    aspect_name: str
    """``tall``, ``square`` or ``wide``: part of the bucket's key in the documented interface."""
    num_frames: int | None = None

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.width, self.height, self.num_frames)

    @property
    def identity(self) -> str:
        """The text that fingerprints and task ids are made of. It must not change: saved states depend on it."""
        return (
            f"BucketShape(width={self.width}, height={self.height}, aspect_name={self.aspect_name!r}, "
            f"num_frames={self.num_frames})"
        )


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file, as the source lists it."""

    name: str
    """The path relative to the source, with forward slashes. It identifies the file."""
    size_bytes: int
    modified_ns: int
    """Time of the last change, in nanoseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Caption:
    """The texts that describe a sample, and where they were found."""

    text: str
    """The first text. Most samples have only one."""
    source: str
    """``sidecar``, ``txt``, ``jsonl``, ``csv``, ``meta_json``, ``file name`` or ``empty``."""
    more: tuple[str, ...] = ()
    """Further texts. The loader takes one of all texts in each epoch."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts."""
        return (self.text, *self.more)


class Window(NamedTuple):
    """The part of a video from which the frames of a sample are taken."""

    start_s: float | None
    """Seconds after the first frame; None if the file has no usable time stamps."""
    first_frame: int
    """The number of the first frame of the part, from 0."""
    last_frame: int
    num_frames: int
    """How many frames the sample has."""


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """A sample to encode: everything except its pixels."""

    file: SourceFile
    caption: Caption
    width: int
    """As displayed: after applying the orientation in the file's header."""
    height: int
    """As displayed."""
    bucket_id: int | None
    """None if the user fixed the size instead of choosing buckets."""
    bucket: Bucket
    number: int = 0
    """The number of this sample among those of its file, from 0."""
    num_samples: int = 1
    """How many samples the file gives."""
    window: Window | None = None
    """The part of the video, where it is not the whole or its beginning."""
    stored_row: Mapping[str, Any] | None = field(default=None, compare=False)
    """The sample's row in the cache, as it is written, if only its captions have changed. Everything else is then
    taken from the cache."""

    @property
    def name(self) -> str:
        """A name that is unique in the source: the file's, with ``#number`` if the file gives several samples."""
        return self.file.name if self.num_samples == 1 else f"{self.file.name}#{self.number}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that could not be encoded."""

    name: str
    reason: str
    """Reads as the rest of a sentence that starts with the name, such as ``is not an image``."""


@dataclass(frozen=True, slots=True)
class SizeChange:
    """How an input is changed to fit its bucket, or the mean over the samples of a bucket."""

    upscale: float
    """The factor by which it is scaled up; 1 if it is not."""
    crop: float
    """The share of its area that cropping loses, from 0 to 1."""
    stretch: float
    """The factor by which its aspect ratio is changed; 1 if it is cropped instead."""


@dataclass(frozen=True, slots=True)
class Task:
    """The unit of work: samples of one bucket that are encoded and committed together."""

    id: str
    """A digest of the samples: the same samples make the same task in every run."""
    bucket: Bucket
    samples: tuple[PlannedSample, ...]
    retry: bool = False
    """Whether these samples failed in an earlier run. Failing again does not count towards stopping the run."""
    num_finished: int = 0
    """How many of the first samples the checkpoint of an interrupted run has."""

    @property
    def captions_only(self) -> bool:
        """Whether all samples are in the cache except for their captions."""
        return self.samples[0].stored_row is not None


HUNYUAN = "hunyuan"


def model_family(model_type: str) -> str:
    """One name for what tools call differently: ``model_family("hunyuanvideo")`` is ``"hunyuan"``.

    Args:
        model_type: The ``model_type`` or the ``processor`` of a cache, or that of a loader.
    """
    name = model_type.lower()
    return HUNYUAN if name.startswith(HUNYUAN) else name


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorInfo:
    """What is known about a processor without loading its model."""

    name: str
    media: tuple[str, ...]
    """``image``, ``video`` or both."""
    model: str
    """The model family, for display."""
    model_type: str
    """The ``model_type`` recorded in caches."""
    default_model_name: str
    """The model that is loaded if the user names none: a hub name."""
    spatial_factor: int
    """Pixels per latent position, along each side."""
    temporal_factor: int = 1
    """Frames per latent frame, after the first."""
    quantum: int = 64
    """Bucket sides are multiples of this many pixels, unless the user asks for a finer or coarser step."""
    patch: int = 2
    """Latent positions per token of the transformer, along each side."""
    latent_channels: int = 16
    text_dtypes: tuple[str, ...] = ("auto",)
    """What the weights of its text encoders can be stored in: ``auto``, and ``fp8`` if it can quantise them."""
    model_version: str = ""
    """The release of the model, recorded in the cache files of videos."""
    version: int = 1
    """Raised when the same inputs give different numbers, so that caches are encoded again."""

    @property
    def min_quantum(self) -> int:
        """Pixels per token of the transformer, along each side. Every bucket step is a multiple of it."""
        return self.spatial_factor * self.patch

    @property
    def frame_rule(self) -> str:
        """The numbers of frames that the model accepts, such as ``4n+1``."""
        if "video" not in self.media:
            return "-"
        return "any" if self.temporal_factor == 1 else f"{self.temporal_factor}n+1"
