"""Which frames of a video are encoded, and how they are scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from latentry.errors import ConfigError
from latentry.media.images import RESIZE_MODES

MODES = ("video", "frames")
WINDOWS = ("head", "middle", "chunks", "slide", "uniform")
SHORT_CLIPS = ("skip", "pad")
MAX_FRAMES = 257
"""The default of ``max_frames``: ten seconds at 25 frames a second, and a length that 4n+1 and 8n+1 allow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoOptions:
    """Which frames of a video are encoded, and how they are scaled.

    >>> VideoOptions(target_frames=81)
    >>> VideoOptions(target_fps=16, target_frames=81, windows="chunks")
    >>> VideoOptions(mode="frames", num_frames=40)
    """

    mode: str = "video"
    """``video`` makes each window of a video one sample. ``frames`` makes each of ``num_frames`` frames one sample."""
    num_frames: int = 10
    """In frames mode, how many frames to take of each video, evenly spaced from the first to the last. A video with
    fewer frames gives all it has."""
    target_frames: int | None = None
    """In video mode, the number of frames of every sample. None takes as many as each video has and the model's
    frame rule allows, up to ``max_frames``."""
    target_fps: float | None = None
    """In video mode, take frames by time at this rate. None takes consecutive frames."""
    windows: str = "head"
    """In video mode, which parts of a video become samples. ``head`` is the first window, ``middle`` the one in the
    middle, ``chunks`` all windows one after another, ``slide`` a window every ``window_step_s`` seconds. ``uniform``
    spreads the frames of one sample evenly over the whole video."""
    window_step_s: float | None = None
    """With ``slide``: seconds from the start of a window to the start of the next."""
    max_frames: int | None = MAX_FRAMES
    """The most frames of a sample if ``target_frames`` is None; None for no limit."""
    split_scenes: bool = False
    """Find scene cuts, and take windows from each scene as if it were a separate video. Needs ``latentry[scenes]``,
    and planning decodes every video."""
    short_clips: str = "skip"
    """What to do with videos of fewer than ``target_frames`` frames: ``skip`` reports them as failures, ``pad``
    repeats their last frame."""
    resize_mode: str = "bilinear"
    """How frames are scaled: ``bilinear``, ``bicubic``, ``nearest``, ``area`` or ``lanczos``."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("mode", self.mode, MODES),
            ("windows", self.windows, WINDOWS),
            ("short_clips", self.short_clips, SHORT_CLIPS),
            ("resize_mode", self.resize_mode, RESIZE_MODES),
        ):
            if value not in allowed:
                raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(allowed)}")
        for name, number in (
            ("num_frames", self.num_frames),
            ("target_frames", self.target_frames),
            ("target_fps", self.target_fps),
            ("window_step_s", self.window_step_s),
            ("max_frames", self.max_frames),
        ):
            if number is not None and not 0 < number < math.inf:
                raise ConfigError(f"{name} is {number}; it must be positive")
        if self.mode == "frames":
            if self.target_fps or self.target_frames:
                raise ConfigError(
                    "target_fps and target_frames are for video mode; in frames mode set num_frames instead"
                )
            if self.windows != "head" or self.window_step_s or self.split_scenes:
                raise ConfigError(
                    "windows, window_step_s and split_scenes are for video mode; leave them out in frames mode"
                )
        if self.windows in ("chunks", "slide") and not self.target_frames:
            raise ConfigError(f"windows={self.windows!r} needs target_frames, the frames of each window")
        if (self.windows == "slide") != (self.window_step_s is not None):
            raise ConfigError("windows='slide' and window_step_s go together; give both or neither")
        if self.windows == "uniform" and self.target_fps:
            raise ConfigError(
                "windows='uniform' spreads frames over the whole video, whatever the rate; leave out target_fps, or "
                "choose other windows"
            )

    @classmethod
    def from_recorded(cls, recorded: Mapping[str, Any]) -> VideoOptions:
        """The options that a recipe records. What releases without windows did is filled in.

        Args:
            recorded: What ``recorded()`` returned, in this release or an earlier one.
        """
        return cls(**with_old_defaults(recorded))

    def recorded(self) -> dict[str, Any]:
        """The options as a recipe records them.

        Options are left out if they have no effect, or have the effect that releases without them had. So caches of
        those releases can still be added to.
        """
        values = asdict(self)
        if self.target_frames or self.mode == "frames":
            del values["max_frames"]
        old = _old_defaults(values)
        return {name: value for name, value in values.items() if name not in old or value != old[name]}


def with_old_defaults(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded options, with those that earlier releases did not have."""
    return {**_old_defaults(recorded), **recorded}


def _old_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """What releases without windows did: the whole video, or its beginning if a rate was given."""
    spread = values.get("mode") != "frames" and not values.get("target_fps")
    return {
        "windows": "uniform" if spread else "head",
        "window_step_s": None,
        "max_frames": None,
        "split_scenes": False,
    }
