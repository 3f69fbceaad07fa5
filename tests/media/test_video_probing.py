"""What a video file has: size, number of frames, time stamps; damaged files."""

from __future__ import annotations

import av
import numpy as np
import pytest
from helpers import read_counters

from latentry.errors import MediaError
from latentry.media.clips.frames import probe_video, read_frames
from latentry.media.clips.timeline import read_timeline
from latentry.testing import make_counter_clip, read_counter
from latentry.testing.media import counter_frame


def test_fragments_and_edit_lists(tmp_path):
    fragmented = make_counter_clip(
        tmp_path / "f.mp4", 60, container_options={"movflags": "frag_keyframe+empty_moov"}
    )
    assert probe_video(fragmented).num_frames == 60
    assert read_counters(fragmented, [59, 0, 31]) == [59, 0, 31]
    trimmed = make_counter_clip(tmp_path / "t.mp4", 60, ticks=lambda i: 40 * (i - 20), gop_size=30)
    count = probe_video(trimmed).num_frames
    with av.open(str(trimmed)) as container:
        shown = [read_counter(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    assert count == len(shown)
    assert read_counters(trimmed, list(range(count))) == shown
    assert read_counters(trimmed, [count - 1, 0]) == [shown[-1], shown[0]]


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_rotation(tmp_path, rotation):
    clip = make_counter_clip(tmp_path / "clip.mp4", 5, rotation=rotation)
    info = probe_video(clip)
    assert (info.width, info.height) == ((96, 64) if rotation == 180 else (64, 96))
    (frame,) = read_frames(clip, read_timeline(clip), [3], lambda pixels: pixels).in_order([3])
    expected = np.rot90(counter_frame(3), k=rotation // 90)
    assert frame.shape == expected.shape
    assert np.abs(frame.astype(int) - expected).mean() < 12


def test_odd_size_and_single_frame(tmp_path):
    clip = make_counter_clip(tmp_path / "clip.mkv", 1, size=(95, 63), pixel_format="yuv444p")
    info = probe_video(clip)
    assert (info.width, info.height, info.num_frames) == (95, 63, 1)
    (shape,) = read_frames(clip, read_timeline(clip), [0], lambda pixels: pixels.shape).in_order([0])
    assert shape == (63, 95, 3)


def test_non_square_pixels(tmp_path):
    clip = make_counter_clip(tmp_path / "clip.mp4", 5, options={"x264-params": "sar=2/1"})
    info = probe_video(clip)
    assert (info.width, info.height) == (192, 64)
    assert read_frames(clip, read_timeline(clip), [4], lambda p: (p.shape, read_counter(p))).in_order(
        [4]
    ) == [((64, 192, 3), 4)]


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "audio"])
def test_damaged_files_raise_media_errors(tmp_path, kind):
    path = tmp_path / "clip.mp4"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("not a film")
    elif kind == "cut":
        whole = make_counter_clip(path, 60).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    else:
        with av.open(str(path), "w") as container:
            stream = container.add_stream("aac", rate=8000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 8000, 0
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    with pytest.raises(MediaError) as raised:
        probe_video(path)
    assert "\n" not in str(raised.value)


def test_truncated_file(tmp_path):
    whole = make_counter_clip(tmp_path / "whole.mkv", 200).read_bytes()
    cut = tmp_path / "cut.mkv"
    cut.write_bytes(whole[: int(len(whole) * 0.6)])
    timeline = read_timeline(cut)
    assert 50 < timeline.num_frames < 200
    assert read_counters(cut, [0, 10, 40]) == [0, 10, 40]


def test_wrong_extension(tmp_path):
    clip = make_counter_clip(tmp_path / "clip.mkv", 10)
    renamed = clip.rename(tmp_path / "clip.mp4")
    assert read_counters(renamed, [9, 0]) == [9, 0]
