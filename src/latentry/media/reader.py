"""One interface to images and videos: what samples a file has, and the pixels of these samples.

Planning, encoding and committing use this interface only and are the same for images and videos.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from latentry.errors import ConfigError, MediaError
from latentry.media.content import MediaFile, read_media_file
from latentry.media.images import RESIZE_MODES, Pixels, decode_image, fit_to_bucket, probe_image
from latentry.media.videos import Timeline, probe_video, read_frames, read_timeline
from latentry.storage import WHOLE_DIGEST_BYTES
from latentry.types import PlannedSample

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})
VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm"})
MODES = ("video", "frames")
SHORT_CLIPS = ("skip", "pad")
_MAX_CLIP_BYTES = 1 << 33


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The samples that a file has, from its header."""

    width: int
    """As shown, after the orientation of the header is applied."""
    height: int
    num_frames: int | None = None
    """Frames per sample; None for images."""
    num_samples: int = 1


@dataclass(frozen=True, slots=True)
class Crop:
    """A sample's pixels, cut to its bucket."""

    pixels: torch.Tensor
    """uint8 [3,H,W], or [3,T,H,W] for video."""
    offset: tuple[int, int]
    """(left, top) of the window in the scaled image."""
    source_frame: int | None = None
    """In frames mode, the number of the frame in its file."""


class MediaReader(Protocol):
    """Reads the files of one type of media. A ``MediaError`` says why a file cannot be used."""

    @property
    def suffixes(self) -> frozenset[str]:
        """The file name extensions, in lower case and with the dot."""

    def probe(self, path: Path) -> ProbeResult:
        """Read the header of a file."""

    def load(self, path: Path) -> MediaFile:
        """Read a file once, for its digest and for ``read``."""

    def read(self, file: MediaFile, samples: Sequence[PlannedSample], seed: int) -> list[Crop]:
        """Decode samples of one file and cut them to their buckets. ``seed`` decides random crops."""


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads images. Each is one sample."""

    crop_mode: str
    resize_mode: str = "bicubic"
    suffixes: frozenset[str] = IMAGE_SUFFIXES

    def probe(self, path: Path) -> ProbeResult:
        return ProbeResult(*probe_image(path))

    def load(self, path: Path) -> MediaFile:
        return read_media_file(path)

    def read(self, file: MediaFile, samples: Sequence[PlannedSample], seed: int) -> list[Crop]:
        (sample,) = samples
        assert file.content is not None, "images are read whole, whatever their size"
        pixels = decode_image(file.content)
        height, width = pixels.shape[:2]
        if (width, height) != (sample.width, sample.height):
            raise MediaError(f"is {width}x{height}, but was {sample.width}x{sample.height} when planned")
        return [
            Crop(*fit_to_bucket(pixels, sample.bucket.resolution, self.crop_mode, seed, self.resize_mode))
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoOptions:
    """Which frames of a video are encoded, and how they are scaled.

    >>> VideoOptions(target_frames=81)
    >>> VideoOptions(target_fps=16, target_frames=81, short_clips="pad")
    >>> VideoOptions(mode="frames", num_frames=40)
    """

    mode: str = "video"
    """``video`` makes each video one sample. ``frames`` makes each of ``num_frames`` frames one sample."""
    num_frames: int = 10
    """In frames mode, how many frames to take of each video, evenly spaced from the first to the last. A video with
    fewer frames gives all it has."""
    target_frames: int | None = None
    """In video mode, the number of frames of every sample. None takes as many as each video has and the model's
    frame rule allows."""
    target_fps: float | None = None
    """In video mode, take frames by time at this rate, starting with the first frame. None takes them evenly spaced
    over the whole video."""
    short_clips: str = "skip"
    """What to do with videos of fewer than ``target_frames`` frames: ``skip`` reports them as failures, ``pad``
    repeats their last frame."""
    resize_mode: str = "bilinear"
    """How frames are scaled: ``bilinear``, ``bicubic``, ``nearest``, ``area`` or ``lanczos``."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("mode", self.mode, MODES),
            ("short_clips", self.short_clips, SHORT_CLIPS),
            ("resize_mode", self.resize_mode, RESIZE_MODES),
        ):
            if value not in allowed:
                raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(allowed)}")
        for name, number in (
            ("num_frames", self.num_frames),
            ("target_frames", self.target_frames),
            ("target_fps", self.target_fps),
        ):
            if number is not None and not 0 < number < math.inf:
                raise ConfigError(f"{name} is {number}; it must be positive")
        if self.mode == "frames" and (self.target_fps or self.target_frames):
            raise ConfigError(
                "target_fps and target_frames are for video mode; in frames mode set num_frames instead"
            )


@dataclass(frozen=True, slots=True)
class VideoReader:
    """Reads videos. Each is one sample, or one sample per extracted frame."""

    options: VideoOptions
    crop_mode: str
    frame_step: int
    """Without ``target_frames``, a sample has a multiple of this many frames, plus one."""
    suffixes: frozenset[str] = VIDEO_SUFFIXES

    def probe(self, path: Path) -> ProbeResult:
        info = probe_video(path)
        options = self.options
        if options.mode == "frames":
            return ProbeResult(info.width, info.height, 1, min(options.num_frames, info.num_frames))
        available = info.num_frames
        if options.target_fps is not None:
            if info.last_frame_s is None:
                raise MediaError("has no usable time stamps, which target_fps needs; leave out target_fps")
            available = int(info.last_frame_s * options.target_fps + 1e-6) + 1
        count = options.target_frames or (available - 1) // self.frame_step * self.frame_step + 1
        if available < count and options.short_clips == "skip":
            rate = f" at {options.target_fps:g} fps" if options.target_fps else ""
            raise MediaError(f"has {available} frames{rate}, fewer than the {count} requested")
        return ProbeResult(info.width, info.height, count)

    def load(self, path: Path) -> MediaFile:
        return read_media_file(path, WHOLE_DIGEST_BYTES)

    def read(self, file: MediaFile, samples: Sequence[PlannedSample], seed: int) -> list[Crop]:
        timeline = read_timeline(file)
        bucket = samples[0].bucket
        count = bucket.num_frames or 1
        if count * bucket.width * bucket.height * 3 > _MAX_CLIP_BYTES:
            raise MediaError(
                f"gives {count} frames of {bucket.folder}, which do not fit in "
                f"{_MAX_CLIP_BYTES >> 30} GB of memory; set target_frames"
            )
        offsets: list[tuple[int, int]] = []

        def keep(frame: Pixels) -> torch.Tensor:
            window, offset = fit_to_bucket(
                frame, bucket.resolution, self.crop_mode, seed, self.options.resize_mode
            )
            offsets.append(offset)
            return window

        if self.options.mode == "frames":
            numbers = evenly_spaced(timeline.num_frames, samples[0].num_samples)
            wanted = [numbers[sample.number] for sample in samples]
            windows = read_frames(file, timeline, wanted, keep)
            return [Crop(w[:, None], offsets[0], number) for w, number in zip(windows, wanted, strict=True)]
        windows = read_frames(file, timeline, self.clip_frames(timeline, count), keep)
        return [Crop(torch.stack(windows, dim=1), offsets[0])]

    def clip_frames(self, timeline: Timeline, count: int) -> list[int]:
        """The numbers of the ``count`` frames that make up a sample."""
        last = timeline.num_frames - 1
        if self.options.target_fps is None:
            if last + 1 < count:
                if self.options.short_clips == "skip":
                    raise MediaError(
                        f"has {last + 1} frames that can be listed, fewer than the {count} requested"
                    )
                return [min(i, last) for i in range(count)]
            return evenly_spaced(last + 1, count)
        stamps = np.array(timeline.stamps, dtype=np.float64)
        times_s = (stamps - stamps[0]) * timeline.seconds_per_unit
        wanted_s = np.arange(count) / self.options.target_fps
        shown = np.searchsorted(times_s, wanted_s + 1e-6, side="right") - 1
        return [int(number) for number in shown.clip(0, last)]


def evenly_spaced(num_frames: int, count: int) -> list[int]:
    """``count`` frame numbers from the first to the last of ``num_frames``, as evenly as integers allow."""
    return [int(number) for number in np.linspace(0, num_frames - 1, count).astype(np.int64)]
