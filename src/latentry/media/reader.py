"""The two kinds of media, behind one face: how many samples a file gives, of what shape, and their pixels.

Everything else, from planning to committing, is the same for pictures and clips.
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
from latentry.media.images import RESIZE_MODES, Pixels, decode_image, fit_to_bucket, probe_image
from latentry.media.videos import Timeline, probe_video, read_frames, read_timeline
from latentry.types import PlannedSample

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})
VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm"})
MODES = ("video", "frames")
SHORT_CLIPS = ("skip", "pad")
_MAX_CLIP_BYTES = 1 << 33


@dataclass(frozen=True, slots=True)
class Extent:
    """What a file offers: its size as shown, and for video the frames of a sample and how many samples."""

    width: int
    height: int
    num_frames: int | None = None
    num_samples: int = 1


@dataclass(frozen=True, slots=True)
class Crop:
    """A sample's pixels, cut to its bucket: uint8 [3,H,W], or [3,T,H,W] for video."""

    pixels: torch.Tensor
    offset: tuple[int, int]
    source_frame: int | None = None
    """In frames mode, the number of the frame in its file."""


class MediaReader(Protocol):
    @property
    def suffixes(self) -> frozenset[str]:
        """The endings of its files."""

    def probe(self, path: Path) -> Extent:
        """Read the header; a ``MediaError`` says why the file is of no use."""

    def read(self, path: Path, samples: Sequence[PlannedSample], seed: int) -> list[Crop]:
        """The pixels of some samples of one file."""


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Pictures: one sample each."""

    crop_mode: str
    resize_mode: str = "bicubic"
    suffixes: frozenset[str] = IMAGE_SUFFIXES

    def probe(self, path: Path) -> Extent:
        return Extent(*probe_image(path))

    def read(self, path: Path, samples: Sequence[PlannedSample], seed: int) -> list[Crop]:
        (sample,) = samples
        pixels = decode_image(path.read_bytes())
        height, width = pixels.shape[:2]
        if (width, height) != (sample.width, sample.height):
            raise MediaError(f"is {width}x{height}, but was {sample.width}x{sample.height} when planned")
        return [Crop(*fit_to_bucket(pixels, sample.bucket, self.crop_mode, seed, self.resize_mode))]


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoOptions:
    """Which frames of a clip are taken, and how they are scaled."""

    mode: str = "video"
    """``video``: a clip is one sample. ``frames``: each of ``num_frames`` evenly spaced frames is one."""
    num_frames: int = 10
    target_frames: int | None = None
    """The length of every clip; None takes as many as each has, under the model's rule."""
    target_fps: float | None = None
    """Take frames by time at this rate, from the beginning, instead of evenly over the whole length."""
    short_clips: str = "skip"
    """What becomes of clips with fewer than ``target_frames``: ``skip``, or ``pad`` with their last frame."""
    resize_mode: str = "bilinear"

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
                "target_fps and target_frames are for whole clips; in frames mode set num_frames"
            )


@dataclass(frozen=True, slots=True)
class VideoReader:
    """Clips: one sample each, or one per extracted frame."""

    choices: VideoOptions
    crop_mode: str
    frame_step: int
    """Clips have a multiple of this many frames, and one more."""
    suffixes: frozenset[str] = VIDEO_SUFFIXES

    def probe(self, path: Path) -> Extent:
        info = probe_video(path)
        choices = self.choices
        if choices.mode == "frames":
            return Extent(info.width, info.height, 1, min(choices.num_frames, info.num_frames))
        available = info.num_frames
        if choices.target_fps is not None:
            if info.last_frame_s is None:
                raise MediaError("gives no time stamps, which target_fps needs; leave target_fps out")
            available = int(info.last_frame_s * choices.target_fps + 1e-6) + 1
        count = choices.target_frames or (available - 1) // self.frame_step * self.frame_step + 1
        if available < count and choices.short_clips == "skip":
            rate = f" at {choices.target_fps:g} a second" if choices.target_fps else ""
            raise MediaError(f"has {available} frames{rate}, fewer than the {count} asked for")
        return Extent(info.width, info.height, count)

    def read(self, path: Path, samples: Sequence[PlannedSample], seed: int) -> list[Crop]:
        timeline = read_timeline(path)
        bucket, count = samples[0].bucket, samples[0].num_frames or 1
        if count * bucket[0] * bucket[1] * 3 > _MAX_CLIP_BYTES:
            raise MediaError(f"would be {count} frames of {bucket[0]}x{bucket[1]} at once; set target_frames")
        offsets: list[tuple[int, int]] = []

        def keep(frame: Pixels) -> torch.Tensor:
            window, offset = fit_to_bucket(frame, bucket, self.crop_mode, seed, self.choices.resize_mode)
            offsets.append(offset)
            return window

        if self.choices.mode == "frames":
            total = samples[0].num_samples
            numbers = _evenly(timeline.num_frames, total)
            wanted = [numbers[sample.number] for sample in samples]
            windows = read_frames(path, timeline, wanted, keep)
            return [Crop(w[:, None], offsets[0], number) for w, number in zip(windows, wanted, strict=True)]
        windows = read_frames(path, timeline, self._clip(timeline, count), keep)
        return [Crop(torch.stack(windows, dim=1), offsets[0])]

    def _clip(self, timeline: Timeline, count: int) -> list[int]:
        """The numbers of the frames that make up a clip of this length."""
        last = timeline.num_frames - 1
        if self.choices.target_fps is None:
            if last + 1 < count:
                if self.choices.short_clips == "skip":
                    raise MediaError(
                        f"has {last + 1} frames that can be listed, fewer than the {count} asked for"
                    )
                return [min(i, last) for i in range(count)]
            return _evenly(last + 1, count)
        stamps = np.array(timeline.stamps, dtype=np.float64)
        times = (stamps - stamps[0]) * timeline.seconds_per_unit
        asked = np.arange(count) / self.choices.target_fps
        shown = np.searchsorted(times, asked + 1e-6, side="right") - 1
        return [int(number) for number in shown.clip(0, last)]


def _evenly(available: int, count: int) -> list[int]:
    """``count`` frame numbers from the first to the last, as evenly as whole numbers allow."""
    return [int(number) for number in np.linspace(0, available - 1, count).astype(np.int64)]
