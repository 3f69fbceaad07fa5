"""Which frames make up the samples of a video."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentry.errors import ConfigError, MediaError
from latentry.media.clips.windows import Clock, evenly_spaced, find_windows, window_frames
from latentry.media.video_options import VideoOptions


def constant(num_frames: int, fps: float = 25) -> Clock:
    return Clock(num_frames, np.arange(num_frames) / fps)


def frames_of(clock: Clock, frame_step: int = 1, scene_starts=(0,), **options) -> list[list[int]]:
    chosen = VideoOptions(**options)
    return [
        window_frames(clock, window, chosen)
        for window in find_windows(clock, chosen, frame_step, scene_starts)
    ]


def test_windows_at_the_own_rate():
    clock = constant(100)
    assert frames_of(clock, target_frames=9) == [list(range(9))]
    assert frames_of(clock, target_frames=9, windows="middle") == [list(range(45, 54))]
    chunks = frames_of(clock, target_frames=9, windows="chunks")
    assert chunks == [list(range(start, start + 9)) for start in range(0, 99, 9)], "one frame is left over"
    slides = frames_of(clock, target_frames=9, windows="slide", window_step_s=1)
    assert [frames[0] for frames in slides] == [0, 25, 50, 75]
    assert frames_of(clock, target_frames=9, windows="uniform") == [evenly_spaced(100, 9)]


def test_windows_at_a_rate():
    clock = constant(100)  # 4 s
    assert frames_of(clock, target_frames=5, target_fps=5) == [[0, 5, 10, 15, 20]]
    assert frames_of(clock, target_frames=5, target_fps=5, windows="middle") == [[35, 40, 45, 50, 55]]
    chunks = frames_of(clock, target_frames=5, target_fps=5, windows="chunks")
    assert chunks == [[start + 5 * k for k in range(5)] for start in (0, 25, 50, 75)]
    slides = frames_of(clock, target_frames=5, target_fps=5, windows="slide", window_step_s=0.5)
    assert [frames[0] for frames in slides] == [0, 12, 25, 37, 50, 62, 75]


def test_the_frames_of_constant_rate_clips_are_evenly_numbered():
    for num_frames in (2, 9, 40, 100, 1001):
        for fps in (25, 24000 / 1001, 30):
            rounded = Clock(num_frames, np.round(np.arange(num_frames) / fps, 3))  # as Matroska rounds
            expected = np.linspace(0, num_frames - 1, 9).astype(np.int64).tolist()
            if num_frames >= 9:
                assert frames_of(rounded, target_frames=9, windows="uniform") == [expected]


def test_the_frames_of_variable_rate_clips_are_even_in_time():
    times = np.concatenate(
        [np.arange(100) / 100, 1 + np.arange(10)]
    )  # a second of 100 fps, then a frame a second
    clock = Clock(len(times), times)
    (frames,) = frames_of(clock, target_frames=11, windows="uniform")
    assert np.allclose(times[frames], np.linspace(0, 10, 11), atol=1)
    assert frames == [0, *range(100, 110)]


def test_length_without_target_frames():
    assert len(frames_of(constant(100), frame_step=4)[0]) == 97
    assert len(frames_of(constant(1000), frame_step=4)[0]) == 257
    assert len(frames_of(constant(1000), frame_step=4, max_frames=100)[0]) == 97
    assert len(frames_of(constant(1000), frame_step=1, max_frames=None)[0]) == 1000


def test_windows_stay_inside_scenes():
    clock = constant(100)
    chunks = frames_of(clock, target_frames=9, windows="chunks", scene_starts=(0, 20, 25))
    assert [frames[0] for frames in chunks] == [0, 9, *range(25, 92, 9)], "the scene of 5 frames gives none"
    heads = frames_of(clock, frame_step=4, scene_starts=(0, 20, 25))
    assert [(frames[0], len(frames)) for frames in heads] == [(0, 17), (20, 5), (25, 73)]
    padded = frames_of(clock, target_frames=9, short_clips="pad", scene_starts=(0, 20, 25))
    assert padded[1] == [20, 21, 22, 23, 24, 24, 24, 24, 24]
    spread = frames_of(clock, target_frames=5, windows="uniform", scene_starts=(0, 50))
    assert spread == [evenly_spaced(50, 5), [50 + number for number in evenly_spaced(50, 5)]]


def test_short_clips():
    assert frames_of(constant(5), target_frames=9) == []
    assert frames_of(constant(5), target_frames=9, short_clips="pad") == [[0, 1, 2, 3, 4, 4, 4, 4, 4]]


def test_files_without_time_stamps():
    clock = Clock(100, None)
    assert frames_of(clock, target_frames=9, windows="middle") == [list(range(45, 54))]
    assert frames_of(clock, target_frames=3, windows="uniform") == [[0, 49, 99]]
    for options in ({"target_fps": 5.0}, {"windows": "slide", "window_step_s": 1.0}):
        with pytest.raises(MediaError, match="no usable time stamps"):
            frames_of(clock, target_frames=9, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"windows": "all"}, "unknown windows 'all'"),
        ({"windows": "chunks"}, "needs target_frames"),
        ({"windows": "slide", "target_frames": 9}, "go together"),
        ({"window_step_s": 1.0, "target_frames": 9}, "go together"),
        ({"windows": "uniform", "target_fps": 5.0}, "leave out target_fps"),
        ({"mode": "frames", "windows": "middle"}, "video mode"),
        ({"mode": "frames", "split_scenes": True}, "video mode"),
        ({"max_frames": 0}, "max_frames is 0"),
    ],
)
def test_invalid_options(options, says):
    with pytest.raises(ConfigError, match=says):
        VideoOptions(**options)


@given(
    gaps_ms=st.lists(st.integers(1, 500), max_size=200),
    windows=st.sampled_from(["head", "middle", "chunks", "slide", "uniform"]),
    target_frames=st.integers(1, 40),
    target_fps=st.none() | st.floats(0.5, 120),
    step_s=st.floats(0.05, 5),
    cuts=st.sets(st.integers(1, 200), max_size=4),
    short_clips=st.sampled_from(["skip", "pad"]),
)
def test_every_window_is_sound(gaps_ms, windows, target_frames, target_fps, step_s, cuts, short_clips):
    times = np.concatenate([[0], np.cumsum(gaps_ms)]) / 1000
    clock = Clock(len(times), times)
    options = VideoOptions(
        windows=windows,
        target_frames=target_frames,
        target_fps=None if windows == "uniform" else target_fps,
        window_step_s=step_s if windows == "slide" else None,
        short_clips=short_clips,
    )
    starts = [0, *sorted(cut for cut in cuts if cut < len(times))]
    found = find_windows(clock, options, 4, starts)
    ends = [*(start - 1 for start in starts[1:]), len(times) - 1]
    for window in found:
        frames = window_frames(clock, window, options)
        assert len(frames) == window.num_frames == target_frames
        assert frames == sorted(frames)
        first, last = next((a, b) for a, b in zip(starts, ends, strict=True) if a <= window.first_frame <= b)
        assert first <= frames[0] <= frames[-1] <= last, "a window stays inside its scene"
        assert window.first_frame <= frames[0] <= frames[-1] <= window.last_frame
        if options.target_fps is None and windows != "uniform" and short_clips == "skip":
            assert frames == list(range(frames[0], frames[0] + target_frames))
    assert [window.start_s for window in found] == sorted(window.start_s for window in found)
    if windows == "chunks" and options.target_fps is None:
        spans = [(window.first_frame, window.last_frame) for window in found]
        assert all(a[1] < b[0] for a, b in itertools.pairwise(spans)), "chunks do not overlap"
    if short_clips == "pad":
        reached = {next(i for i, end in enumerate(ends) if window.first_frame <= end) for window in found}
        assert reached == set(range(len(starts))), "every scene gives a window"


@given(st.integers(1, 100), st.none() | st.floats(0.5, 60), st.sampled_from(["uniform", "head"]))
def test_options_survive_being_recorded(target_frames, target_fps, windows):
    if windows == "uniform":
        target_fps = None
    options = VideoOptions(target_frames=target_frames, target_fps=target_fps, windows=windows)
    again = VideoOptions.from_recorded(options.recorded())
    assert again.recorded() == options.recorded()
    assert (again.windows, again.target_frames, again.target_fps) == (windows, target_frames, target_fps)
