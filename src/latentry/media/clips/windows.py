"""Which frames make up the samples of a video: pure arithmetic on the times of its frames.

A window is a stretch of the video from which the frames of one sample are taken. Planning finds the windows. Encoding
finds the frames of a window again from the window, the time stamps and the options, so nothing else has to be stored.

Windows are laid out in time. At the video's own rate, a window is a run of consecutive frames. With a target rate, it is
a run of moments, and each moment shows the last frame that began before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from latentry.errors import MediaError
from latentry.media.video_options import VideoOptions
from latentry.types import Window

Times = npt.NDArray[np.float64]
_EPSILON_S = 1e-6


@dataclass(frozen=True, slots=True)
class Clock:
    """The frames of a video: how many, and when they are shown."""

    num_frames: int
    times_s: Times | None
    """Seconds after the first frame; None if the file has no usable time stamps."""

    def shown_at(self, moments_s: Times) -> npt.NDArray[np.int64]:
        """The frame that is shown at each moment."""
        assert self.times_s is not None
        return np.searchsorted(self.times_s, moments_s + _EPSILON_S, side="right") - 1

    def time_s(self, frame: int) -> float | None:
        return None if self.times_s is None else float(self.times_s[frame])

    def is_constant(self, first: int, last: int) -> bool:
        """Whether no frame is shown half a frame interval or more from where a constant rate puts it."""
        if self.times_s is None or last - first < 2:
            return True
        times = self.times_s[first : last + 1]
        even = np.linspace(times[0], times[-1], len(times))
        return bool(np.abs(times - even).max() < (times[-1] - times[0]) / (len(times) - 1) / 2)


def find_windows(
    clock: Clock, options: VideoOptions, frame_step: int, scene_starts: Sequence[int] = (0,)
) -> list[Window]:
    """The windows of a video, in order.

    >>> find_windows(clock, VideoOptions(target_frames=81, windows="chunks"), frame_step=4)

    Args:
        clock: The frames of the video.
        options: Which windows to take.
        frame_step: Without ``target_frames``, a sample has a multiple of this many frames, plus one.
        scene_starts: The first frame of each scene. Windows do not cross the boundaries.

    Raises:
        MediaError: The time stamps are unusable, but are needed.
    """
    if clock.times_s is None and (options.target_fps or options.windows == "slide"):
        needed = "target_fps" if options.target_fps else "windows='slide'"
        raise MediaError(f"has no usable time stamps, which {needed} needs; leave out {needed}")
    ends = [*(start - 1 for start in scene_starts[1:]), clock.num_frames - 1]
    return [
        window
        for first, last in zip(scene_starts, ends, strict=True)
        for window in _windows_of_scene(clock, first, last, options, frame_step)
    ]


def num_available(clock: Clock, first: int, last: int, options: VideoOptions) -> int:
    """How many frames a stretch has at the target rate, or at its own."""
    if options.target_fps is None or clock.times_s is None:
        return last - first + 1
    return int((clock.times_s[last] - clock.times_s[first]) * options.target_fps + _EPSILON_S) + 1


def window_length(available: int, options: VideoOptions, frame_step: int) -> int:
    """How many frames a sample has."""
    if options.target_frames:
        return options.target_frames
    most = available if options.max_frames is None else min(available, options.max_frames)
    return (most - 1) // frame_step * frame_step + 1


def _windows_of_scene(
    clock: Clock, first: int, last: int, options: VideoOptions, frame_step: int
) -> Iterator[Window]:
    available = num_available(clock, first, last, options)
    length = window_length(available, options, frame_step)
    if available < length:
        if options.short_clips == "pad":
            yield Window(clock.time_s(first), first, last, length)
        return
    if options.windows == "uniform":
        yield Window(clock.time_s(first), first, last, length)
        return
    for offset in _offsets(clock, first, available, length, options):
        if options.target_fps is None or clock.times_s is None:
            start = first + int(offset)
            yield Window(clock.time_s(start), start, start + length - 1, length)
        else:
            start_s = float(clock.times_s[first] + offset / options.target_fps)
            bounds = clock.shown_at(np.array([start_s, start_s + (length - 1) / options.target_fps]))
            yield Window(start_s, int(bounds[0]), min(int(bounds[1]), last), length)


def _offsets(clock: Clock, first: int, available: int, length: int, options: VideoOptions) -> list[float]:
    """Where windows start, in frames after the first at the target rate, or at the video's own."""
    slack = available - length
    if options.windows == "middle":
        return [slack // 2]
    if options.windows == "chunks":
        return list(range(0, slack + 1, length))
    if options.windows == "slide":
        assert clock.times_s is not None
        assert options.window_step_s is not None
        if options.target_fps is not None:
            step = options.window_step_s * options.target_fps
            return [number * step for number in range(int(slack / step + _EPSILON_S) + 1)]
        latest = clock.times_s[first + slack] - clock.times_s[first]
        moments = np.arange(int(latest / options.window_step_s + _EPSILON_S) + 1) * options.window_step_s
        starts = np.searchsorted(clock.times_s, clock.times_s[first] + moments - _EPSILON_S) - first
        return [int(start) for start in np.unique(starts.clip(0, slack))]
    return [0]


def window_frames(clock: Clock, window: Window, options: VideoOptions) -> list[int]:
    """The numbers of the frames that make up a window. The last repeats if there are too few."""
    first, last, count = window.first_frame, window.last_frame, window.num_frames
    if options.target_fps is not None:
        start_s = window.start_s if window.start_s is not None else 0.0
        shown = clock.shown_at(start_s + np.arange(count) / options.target_fps)
        return [int(number) for number in shown.clip(first, last)]
    if options.windows != "uniform" or last - first + 1 < count:
        return [min(first + number, last) for number in range(count)]
    if clock.is_constant(first, last):
        return [first + number for number in evenly_spaced(last - first + 1, count)]
    assert clock.times_s is not None
    shown = clock.shown_at(np.linspace(clock.times_s[first], clock.times_s[last], count))
    return [int(number) for number in shown.clip(first, last)]


def evenly_spaced(num_frames: int, count: int) -> list[int]:
    """``count`` frame numbers from the first to the last of ``num_frames``, as evenly as integers allow."""
    return [int(number) for number in np.linspace(0, num_frames - 1, count).astype(np.int64)]
