"""The frames that are read are the frames that were requested, in every codec and container."""

from __future__ import annotations

import subprocess
import sys

import av
import numpy as np
import pytest
from helpers import read_counters, real_clips
from PIL import Image

from latentry.errors import MediaError
from latentry.media.clips.frames import probe_video, read_frames
from latentry.media.clips.timeline import read_timeline
from latentry.media.clips.windows import Clock, find_windows, window_frames
from latentry.media.video_options import VideoOptions
from latentry.media.video_reader import VideoReader
from latentry.testing import make_counter_clip


def first_window(clip, options: VideoOptions, frame_step: int = 4) -> list[int]:
    """The frames of a clip's first sample."""
    timeline = read_timeline(clip)
    clock = Clock(timeline.num_frames, timeline.times_s())
    return window_frames(clock, find_windows(clock, options, frame_step)[0], options)


def uneven(number: int) -> int:
    """Milliseconds at which frames of a variable-rate clip are shown."""
    return 40 * number + 300 * (number // 7) + (number * 37) % 30


CODECS = [
    ("a.mp4", "libx264", "yuv420p"),
    ("a.mov", "libx264", "yuv444p"),
    ("a.mkv", "libx264", "yuv420p10le"),
    ("b.mp4", "libx265", "yuv420p"),
    ("b.mkv", "libx265", "yuv420p10le"),
    ("c.webm", "libvpx", "yuv420p"),
    ("d.webm", "libvpx-vp9", "yuv420p"),
    ("e.mkv", "libsvtav1", "yuv420p"),
    ("e.mp4", "libsvtav1", "yuv420p10le"),
    ("f.avi", "mpeg4", "yuv420p"),
    ("f.mp4", "mpeg4", "yuv420p"),
    ("g.avi", "mjpeg", "yuvj420p"),
    ("h.mov", "prores_ks", "yuv422p10le"),
]


@pytest.mark.parametrize(("name", "codec", "pixel_format"), CODECS)
@pytest.mark.parametrize("ticks", [None, uneven], ids=["constant", "variable"])
def test_requested_frames_are_read(tmp_path, name, codec, pixel_format, ticks):
    if ticks and name.endswith(".avi"):
        ticks = None  # this container has no time stamps to vary
    clip = make_counter_clip(tmp_path / name, 60, codec=codec, pixel_format=pixel_format, ticks=ticks)
    info = probe_video(clip)
    assert (info.width, info.height, info.num_frames) == (96, 64, 60)
    wanted = [59, 0, 13, 14, 14, 37, 58, 1]
    assert read_counters(clip, wanted) == wanted
    assert read_counters(clip, list(range(60))) == list(range(60))


@pytest.mark.parametrize("ticks", [None, uneven], ids=["constant", "variable"])
def test_frames_by_time(tmp_path, ticks):
    clip = make_counter_clip(tmp_path / "clip.mp4", 120, ticks=ticks)
    times = [(uneven(i) - uneven(0)) / 1000 if ticks else i / 25 for i in range(120)]
    numbers = first_window(clip, VideoOptions(target_fps=5, target_frames=13))
    shown = [max(i for i, time in enumerate(times) if time <= k / 5 + 1e-6) for k in range(13)]
    assert numbers == shown
    assert read_counters(clip, numbers) == shown


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.avi"])
def test_frame_count_at_a_rate(tmp_path, name):
    clip = make_counter_clip(tmp_path / name, 60, codec="mpeg4" if name.endswith("avi") else "libx264")
    whole = VideoReader(VideoOptions(target_fps=25), "center", frame_step=1)
    assert whole.probe(clip).num_frames == 60
    assert first_window(clip, whole.options, frame_step=1) == list(range(60))
    with pytest.raises(MediaError, match="has 60 frames at 25 fps, fewer than the 61 requested"):
        VideoReader(VideoOptions(target_fps=25, target_frames=61), "center", frame_step=1).probe(clip)
    assert VideoReader(VideoOptions(target_fps=50), "center", frame_step=1).probe(clip).num_frames == 119


def test_frames_are_evenly_spaced(tmp_path):
    clip = make_counter_clip(tmp_path / "clip.mp4", 100)
    options = VideoOptions(target_frames=9, windows="uniform")
    reader = VideoReader(options, "center", frame_step=4)
    assert first_window(clip, options) == [0, 12, 24, 37, 49, 61, 74, 86, 99]
    assert reader.probe(clip).num_frames == 9
    assert VideoReader(VideoOptions(), "center", frame_step=4).probe(clip).num_frames == 97


def test_real_clips_frame_by_frame(tmp_path):
    clips = real_clips()
    assert [clip.name for clip in clips] == [
        "bigbuckbunny.mp4", "bikes.mp4", "carphone_distorted.mp4", "carphone_pristine.mp4",
    ]  # fmt: skip
    for clip in clips:
        timeline = read_timeline(clip)
        assert timeline.num_frames == probe_video(clip).num_frames
        with av.open(str(clip)) as container:
            one_by_one = [frame.to_ndarray(format="gray") for frame in container.decode(video=0)]
        assert len(one_by_one) == timeline.num_frames
        wanted = [timeline.num_frames - 1, 0, 50, 51, 77]
        for number, frame in zip(
            wanted, read_frames(clip, timeline, wanted, lambda pixels: pixels).in_order(wanted), strict=True
        ):
            stored = one_by_one[0].shape[::-1]  # two of them have pixels that are not square
            grey = np.asarray(Image.fromarray(frame).convert("L").resize(stored)).astype(int)
            distances = [np.abs(grey - other).mean() for other in one_by_one[max(0, number - 2) : number + 3]]
            assert np.argmin(distances) == min(2, number), (clip.name, number)


@pytest.mark.slow
def test_memory_does_not_grow_with_length(tmp_path):
    film = make_counter_clip(
        tmp_path / "film.mp4", 1000, size=(1280, 720), gop_size=50, options={"preset": "ultrafast"}
    )
    code = f"""
from pathlib import Path
from latentry.media.clips.timeline import read_timeline
from latentry.media.clips.frames import read_frames
from latentry.testing import read_counter
import av

def peak_mb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

before = peak_mb()
film = Path({str(film)!r})
wanted = list(range(0, 1000, 25))
assert read_frames(film, read_timeline(film), wanted, read_counter).in_order(wanted) == wanted
print(peak_mb() - before)
"""
    grown_mb = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert 1 < grown_mb < 300, "the frames alone are 2,600 MB"
