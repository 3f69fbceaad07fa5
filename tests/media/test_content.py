"""The bytes that are hashed are the bytes that are decoded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import EXAMPLES, real_clips

from latentry import Recipe, prepare
from latentry.errors import MediaError
from latentry.media.clips.frames import read_frames
from latentry.media.clips.timeline import read_timeline
from latentry.media.content import MediaFile, read_media_file
from latentry.media.image_reader import ImageReader
from latentry.media.video_options import VideoOptions
from latentry.media.video_reader import VideoReader
from latentry.storage import content_digest
from latentry.testing import assert_same_cache, make_counter_clip, read_counter
from latentry.types import Bucket, Caption, PlannedSample, SourceFile

VIDEOS = VideoReader(VideoOptions(target_frames=5, windows="uniform"), "center", frame_step=4)
IMAGES = ImageReader("center")


def planned(path: Path, reader, bucket=(96, 64)) -> PlannedSample:
    found = reader.probe(path)
    file = SourceFile(path.name, path.stat().st_size, path.stat().st_mtime_ns)
    return PlannedSample(
        file, Caption("", "file name"), found.width, found.height, None, Bucket(*bucket, found.num_frames)
    )


@pytest.fixture
def small_limit(monkeypatch):
    """Treat files of more than 1000 bytes as large, without making files of 64 MB."""
    monkeypatch.setattr("latentry.storage.WHOLE_DIGEST_BYTES", 1000)
    monkeypatch.setattr("latentry.storage._BLOCK_BYTES", 10)
    monkeypatch.setattr("latentry.media.video_reader.WHOLE_DIGEST_BYTES", 1000)


def test_digest_is_the_content_digest(tmp_path):
    for size in (0, 1, 100_000):
        path = tmp_path / "file"
        path.write_bytes(os.urandom(size))
        assert read_media_file(path).digest == content_digest(path)
        assert read_media_file(path, max_bytes=1).digest == content_digest(path)


def test_large_images_are_read_whole_and_keep_their_sampled_digest(tmp_path, small_limit):
    path = Path(shutil.copy(EXAMPLES / "home" / "coffee.png", tmp_path))
    file = IMAGES.load(path)
    assert file.content == path.read_bytes()
    assert file.digest == content_digest(path)
    content = bytearray(path.read_bytes())
    content[15] ^= 1  # between two samples
    path.write_bytes(content)
    assert content_digest(path) == file.digest, "the limit is lowered, so the digest covers samples only"


def test_large_videos_stay_on_disk(tmp_path, small_limit):
    clip = make_counter_clip(tmp_path / "clip.mp4", 20)
    file = VIDEOS.load(clip)
    assert file.content is None
    assert file.digest == content_digest(clip)
    (crop,) = VIDEOS.read(file, [planned(clip, VIDEOS)], seed=0)
    assert [read_counter(f.permute(1, 2, 0).numpy()) for f in crop.pixels.unbind(1)] == [0, 4, 9, 14, 19]


@pytest.mark.parametrize("reader", [IMAGES, VIDEOS], ids=["image", "video"])
def test_file_that_is_replaced_after_the_hash(tmp_path, reader):
    """The pixels are those of the content that was hashed."""
    if reader is IMAGES:
        path, other = tmp_path / "a.png", EXAMPLES / "home" / "moving_clock.png"
        shutil.copy(EXAMPLES / "home" / "coffee.png", path)
    else:
        path = make_counter_clip(tmp_path / "a.mp4", 20)
        other = make_counter_clip(tmp_path / "b.mp4", 40)
    sample = planned(path, reader)
    digest = content_digest(path)
    (expected,) = reader.read(reader.load(path), [sample], seed=0)
    file = reader.load(path)
    shutil.copy(other, path)
    (crop,) = reader.read(file, [sample], seed=0)
    assert file.digest == digest != content_digest(path)
    assert torch.equal(crop.pixels, expected.pixels)
    path.unlink()
    (crop,) = reader.read(file, [sample], seed=0)
    assert torch.equal(crop.pixels, expected.pixels)


def test_run_during_which_a_file_is_replaced(photos, tmp_path, monkeypatch):
    """The row has the digest of the content that was encoded."""
    recipe = Recipe(max_pixels=64 * 64)
    prepare(recipe, image_dir=photos, output_dir=tmp_path / "undisturbed")
    load = ImageReader.load

    def load_and_replace(self, path):
        file = load(self, path)
        if path.name == "coffee.png":
            shutil.copy(photos / "home" / "moving_clock.png", path)
        return file

    monkeypatch.setattr(ImageReader, "load", load_and_replace)
    prepare(recipe, image_dir=photos, output_dir=tmp_path / "disturbed")
    assert content_digest(photos / "home" / "coffee.png") == content_digest(
        photos / "home" / "moving_clock.png"
    )
    assert_same_cache(tmp_path / "disturbed", tmp_path / "undisturbed")


CONTAINERS = {
    "mp4": {},
    "mov": {"pixel_format": "yuv444p"},
    "mkv": {"pixel_format": "yuv420p10le"},
    "avi": {"codec": "mpeg4"},
    "webm": {"codec": "libvpx"},
    "fragmented.mp4": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "faststart.mp4": {"container_options": {"movflags": "faststart"}},
    "rotated.mp4": {"rotation": 90},
    "trimmed.mp4": {"ticks": lambda i: 40 * (i - 20), "gop_size": 30},
    "variable.mkv": {"ticks": lambda i: 40 * i + (i * 37) % 30},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_videos_from_memory_equal_those_from_disk(tmp_path, name):
    clip = make_counter_clip(tmp_path / f"clip.{name}", 60, **CONTAINERS[name])
    assert_same_from_memory(clip)


@pytest.mark.parametrize("number", range(4))
def test_real_clips_from_memory_equal_those_from_disk(number):
    assert_same_from_memory(real_clips()[number], step=9)


def assert_same_from_memory(clip: Path, step: int = 1) -> None:
    file = VIDEOS.load(clip)
    assert file.content is not None
    timeline = read_timeline(clip)
    assert read_timeline(file) == timeline
    wanted = [timeline.num_frames - 1, *range(0, timeline.num_frames, step)]
    from_disk = read_frames(clip, timeline, wanted, lambda pixels: pixels).in_order(wanted)
    from_memory = read_frames(file, timeline, wanted, lambda pixels: pixels).in_order(wanted)
    assert all(np.array_equal(*pair) for pair in zip(from_disk, from_memory, strict=True))


@pytest.mark.parametrize("content", [b"", b"not a video", b"\0" * 5000], ids=["empty", "text", "zeros"])
def test_damaged_videos_in_memory_raise_media_errors(tmp_path, content):
    file = MediaFile(tmp_path / "clip.mp4", "", content)
    with pytest.raises(MediaError, match=r"^cannot be decoded: "):
        read_timeline(file)
