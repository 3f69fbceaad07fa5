"""Which frames of a video are encoded, and how they are scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass

from latentry.errors import ConfigError
from latentry.media.images import RESIZE_MODES

MODES = ("video", "frames")
SHORT_CLIPS = ("skip", "pad")


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
