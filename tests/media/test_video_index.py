"""Planning reads the header of MP4 and MOV files only, and finds what reading the whole file would find."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from clip_files import make_textured_clip
from helpers import real_clips

from latentry.errors import MediaError
from latentry.media.clips.indexed_file import IndexedFile
from latentry.media.clips.timeline import Timeline, read_timeline
from latentry.media.clips.video_file import open_video
from latentry.media.content import MediaFile
from latentry.media.video_options import VideoOptions
from latentry.media.video_reader import VideoReader
from latentry.testing import make_counter_clip


def by_reading_all(path: Path) -> Timeline:
    return read_timeline(MediaFile(path, "", path.read_bytes()))


def listed(clip: Path, read_bytes: int = 1 << 12) -> tuple[Timeline, int]:
    """The timeline, and how many bytes were read, with small reads so that small clips tell."""
    from latentry.media.clips import timeline, video_file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(video_file, "_INDEXED_READ_BYTES", read_bytes)
        with closing(IndexedFile(clip)) as file:
            return timeline.list_packets(file), file.num_bytes_read


CLIPS = {
    "h264.mp4": {},
    "b-frames.mp4": {"options": {"bf": "3", "b-pyramid": "normal"}},
    "variable.mp4": {"ticks": lambda i: 40 * i + 300 * (i // 7) + (i * 37) % 30},
    "h265.mp4": {"codec": "libx265"},
    "av1.mp4": {"codec": "libsvtav1"},
    "mpeg4.mp4": {"codec": "mpeg4"},
    "mjpeg.mov": {"codec": "mjpeg", "pixel_format": "yuvj420p"},
    "prores.mov": {"codec": "prores_ks", "pixel_format": "yuv422p10le"},
    "faststart.mp4": {"container_options": {"movflags": "faststart"}},
    "fragments.mp4": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "some fragments.mp4": {"container_options": {"movflags": "frag_keyframe"}},
    "edit list.mp4": {"ticks": lambda i: 40 * (i - 20), "gop_size": 30},
}


@pytest.mark.parametrize("name", CLIPS)
def test_the_index_says_what_the_packets_say(tmp_path, name):
    clip = make_counter_clip(tmp_path / name, 60, **CLIPS[name])
    timeline, _ = listed(clip)
    assert timeline == by_reading_all(clip)
    assert read_timeline(clip) == timeline


def test_real_clips():
    for clip in real_clips():
        assert listed(clip)[0] == by_reading_all(clip)


@pytest.mark.parametrize("movflags", ["", "faststart"])
def test_packets_are_not_read(tmp_path, movflags):
    clip = make_textured_clip(tmp_path / "clip.mp4", 200)
    if movflags:
        clip = make_counter_clip(
            tmp_path / "fast.mp4", 300, container_options={"movflags": movflags}, size=(640, 480)
        )
    timeline, num_bytes = listed(clip)
    assert timeline.from_index
    assert num_bytes < clip.stat().st_size / 3


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_the_index_lies_about_a_truncated_file(tmp_path, share):
    whole = make_counter_clip(
        tmp_path / "whole.mp4", 300, container_options={"movflags": "faststart"}, size=(320, 240)
    ).read_bytes()
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(whole[: int(len(whole) * share)])
    timeline, _ = listed(cut)
    assert timeline == by_reading_all(cut)
    assert timeline.num_frames < 300


def test_other_containers_are_read_whole(tmp_path):
    for name in ("clip.mkv", "clip.avi", "clip.ts"):
        clip = make_counter_clip(tmp_path / name, 30, codec="mpeg4")
        timeline = read_timeline(clip)
        assert not timeline.from_index
        assert timeline == by_reading_all(clip)


def test_planning_says_how_frames_were_counted(tmp_path):
    reader = VideoReader(VideoOptions(target_frames=5), "center", frame_step=4)
    for name, says in (("a.mp4", "from the index in the header"), ("a.mkv", "by reading the whole file")):
        clip = make_counter_clip(tmp_path / name, 7)
        assert reader.probe(clip).notes == (f"frames counted {says}",)


def test_a_file_with_skipped_packets(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(1, 101)))

    class Entry:
        def __init__(self, pos: int, size: int) -> None:
            self.pos, self.size = pos, size

    class Stream:
        index_entries = (Entry(40, 10), Entry(10, 5), Entry(15, 5), Entry(12, 3), Entry(-1, 7), Entry(60, 0))

    with closing(IndexedFile(path)) as file:
        file.skip_packets([Stream()])
        found = b""
        while part := file.read(7):
            found += part
        expected = bytearray(range(1, 101))
        expected[10:20], expected[40:50] = bytes(10), bytes(10)
        assert found == bytes(expected)
        assert file.num_bytes_read == 80
        assert file.seek(-5, 2) == 95
        assert file.seek(2, 1) == file.tell() == 97
        assert file.read(100) == bytes([98, 99, 100])


def test_errors_stay_one_line(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"\x00\x00\x00\x18ftypisom" + bytes(1000))
    with pytest.raises(MediaError) as raised, closing(IndexedFile(path)) as file, open_video(file):
        pass
    assert "\n" not in str(raised.value)
