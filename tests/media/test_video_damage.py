"""Damaged videos: what decoders conceal is noticed, for the samples it concerns, and good files raise no alarm."""

from __future__ import annotations

import numpy as np
import pytest
from clip_files import make_textured_clip, overwrite, packets_of
from helpers import real_clips

from latentry.errors import MediaError
from latentry.media.clips.frames import probe_video, read_frames
from latentry.media.clips.timeline import read_timeline
from latentry.media.video_options import VideoOptions
from latentry.media.video_reader import VideoReader
from latentry.types import Bucket, Caption, PlannedSample, SourceFile

CODECS = [
    ("a.mp4", "libx264", "yuv420p"),
    ("a.mkv", "libx264", "yuv420p"),
    ("a.ts", "libx264", "yuv420p"),
    ("b.mp4", "mpeg4", "yuv420p"),
    ("b.avi", "mpeg4", "yuv420p"),
    ("c.mpg", "mpeg2video", "yuv420p"),
    ("d.avi", "mjpeg", "yuvj420p"),
    ("e.mov", "prores_ks", "yuv422p10le"),
    ("f.mp4", "libsvtav1", "yuv420p"),
]
MORE_CODECS = [
    ("g.mp4", "libx265", "yuv420p"),
    ("h.webm", "libvpx", "yuv420p"),
    ("i.webm", "libvpx-vp9", "yuv420p"),
    ("j.wmv", "wmv2", "yuv420p"),
    ("k.flv", "flv", "yuv420p"),
    ("l.gif", "gif", "rgb8"),
    ("m.mkv", "ffv1", "yuv420p"),
    ("n.3gp", "mpeg4", "yuv420p"),
]


def decode(clip):
    timeline = read_timeline(clip)
    return read_frames(
        clip, timeline, range(timeline.num_frames), lambda pixels: pixels[::2, ::2].astype(int)
    )


@pytest.mark.parametrize(("name", "codec", "pixel_format"), CODECS + MORE_CODECS)
def test_good_clips_raise_no_alarm(tmp_path, name, codec, pixel_format):
    frames = decode(make_textured_clip(tmp_path / name, codec=codec, pixel_format=pixel_format))
    assert (len(frames.kept), frames.damage, frames.num_problems) == (48, {}, 0)


@pytest.mark.parametrize(
    "parameters",
    [
        "open-gop=1:keyint=12:bframes=3",
        "intra-refresh=1:keyint=20",
        "slices=4",
        "tff=1",
        "bframes=5:b-pyramid=strict",
    ],
)
@pytest.mark.parametrize("ending", ["mp4", "mkv", "ts"])
def test_unusual_streams_raise_no_alarm(tmp_path, parameters, ending):
    clip = make_textured_clip(tmp_path / f"clip.{ending}", options={"x264-params": parameters})
    timeline = read_timeline(clip)
    assert timeline.num_frames == 48
    for wanted in ([5, 13, 29, 47], [12, 24], list(range(48))):
        frames = read_frames(clip, timeline, wanted, lambda pixels: pixels.shape)
        assert (sorted(frames.kept), frames.damage) == (wanted, {})


def test_real_clips_raise_no_alarm():
    for clip in real_clips():
        frames = decode(clip)
        assert (frames.damage, frames.num_problems) == ({}, 0)


@pytest.mark.parametrize(("name", "codec", "pixel_format"), CODECS)
def test_smeared_frames_are_damaged(tmp_path, name, codec, pixel_format):
    clip = make_textured_clip(tmp_path / name, codec=codec, pixel_format=pixel_format)
    good, stamps = decode(clip).kept, read_timeline(clip).stamps
    rng = np.random.default_rng(0)
    for position, size, _ in packets_of(clip)[27:30]:
        overwrite(clip, position + size // 3, rng.bytes(size // 2))
    frames, found = decode(clip), read_timeline(clip).stamps
    damaged = {stamps.index(found[number]) for number in frames.damage}
    kept = {stamps.index(found[number]): pixels for number, pixels in frames.kept.items()}
    assert damaged, "somebody complained"
    assert not [number for number in damaged if number < 24 or number > 37], "other GOPs are fine"
    for other in [*range(20), *range(40, 48)]:
        assert np.array_equal(kept[other], good[other])
    visible = {n for n in good if n in kept and np.abs(kept[n] - good[n]).max() > 40}
    assert len(visible - damaged) <= 1, "a decoder may notice the damage one frame late"


def test_a_damaged_stretch_of_the_file(tmp_path):
    for name, codec in (
        ("a.mp4", "libx264"),
        ("b.mp4", "libx265"),
        ("c.webm", "libvpx"),
        ("d.webm", "libvpx-vp9"),
    ):
        clip = make_textured_clip(
            tmp_path / name,
            codec=codec,
            options={"x265-params": "log-level=0"} if codec == "libx265" else None,
        )
        packets = packets_of(clip)
        start, end = packets[17][0], packets[21][0]
        overwrite(clip, start, bytes(end - start))
        timeline = read_timeline(clip)
        frames = decode(clip)
        middle = [n for n in range(timeline.num_frames) if n in frames.damage]
        lost = timeline.loss_between(0, timeline.num_frames - 1)
        assert middle or lost, name
        assert 0 not in frames.damage, name
        assert timeline.num_frames - 1 not in frames.damage, name


def sample(clip, number: int, num_samples: int) -> PlannedSample:
    info = probe_video(clip)
    file = SourceFile(clip.name, 0, 0)
    return PlannedSample(
        file,
        Caption("", ""),
        width=info.width,
        height=info.height,
        bucket_id=None,
        bucket=Bucket(64, 64, 1),
        number=number,
        num_samples=num_samples,
    )


def test_only_the_samples_that_damage_concerns_fail(tmp_path):
    clip = make_textured_clip(tmp_path / "clip.mp4", options={"bf": "0"})
    position, size, number = packets_of(clip)[26]
    assert number == 26
    overwrite(clip, position + size // 3, np.random.default_rng(0).bytes(size // 2))
    reader = VideoReader(VideoOptions(mode="frames", num_frames=48), "center", frame_step=1)
    crops = reader.read(reader.load(clip), [sample(clip, n, 48) for n in range(48)], seed=0)
    damaged = [n for n, crop in enumerate(crops) if isinstance(crop, str) or crop.damage]
    assert damaged == list(range(26, 36))


def test_a_clip_keeps_its_length_where_a_frame_is_missing(tmp_path):
    clip = make_textured_clip(tmp_path / "clip.mp4", options={"bf": "0"})
    position, size, _ = packets_of(clip)[7]
    overwrite(clip, position, b"\xff" * size)  # not even the size of the NAL unit is left
    reader = VideoReader(VideoOptions(target_frames=9), "center", frame_step=1)
    planned = sample(clip, 0, 1)
    planned = PlannedSample(
        **{**{f: getattr(planned, f) for f in planned.__slots__}, "bucket": Bucket(64, 64, 9)}
    )
    (crop,) = reader.read(reader.load(clip), [planned], seed=0)
    assert crop.pixels.shape == (3, 9, 64, 64)
    assert "frame 7" in crop.damage


@pytest.mark.parametrize("name", ["noise.mp4", "noise.mpg", "noise.m4v", "noise.gif", "noise.ts"])
def test_noise_is_no_video(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(np.random.default_rng(1).bytes(300_000))
    with pytest.raises(MediaError):
        probe_video(path)


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "libx264"), ("b.mpg", "mpeg2video"), ("c.avi", "mpeg4")]
)
def test_noise_in_a_valid_container(tmp_path, name, codec):
    """The header promises a video, but all packets except the first few are noise."""
    clip = make_textured_clip(tmp_path / name, codec=codec)
    rng = np.random.default_rng(1)
    packets = packets_of(clip)
    if name.endswith("mpg"):
        content = clip.read_bytes()
        overwrite(clip, 6000, rng.bytes(len(content) - 6000))
    else:
        for position, size, _ in packets[3:]:
            overwrite(clip, position + 12, rng.bytes(size - 12))
    reader = VideoReader(VideoOptions(target_frames=9, short_clips="pad"), "center", frame_step=1)
    try:
        result = reader.probe(clip)
        planned = sample(clip, 0, 1)
        values = {f: getattr(planned, f) for f in planned.__slots__}
        planned = PlannedSample(**{**values, "bucket": Bucket(64, 64, result.num_frames)})
        (crop,) = reader.read(reader.load(clip), [planned], seed=0)
        assert isinstance(crop, str) or crop.damage
    except MediaError:
        pass  # it is refused at once, which is fine


def test_a_stream_that_starts_between_key_frames(tmp_path):
    """Recordings of broadcasts do. Players start at the first key frame."""
    whole = make_textured_clip(tmp_path / "whole.ts").read_bytes()
    packet = 188
    cut = tmp_path / "cut.ts"
    cut.write_bytes(whole[packet * 40 :])
    frames = decode(cut)
    assert frames.kept
    assert frames.damage == {}
    assert len(frames.kept) in (36, 24)


def test_lost_clusters_of_a_matroska_file(tmp_path):
    clip = make_textured_clip(tmp_path / "clip.mkv")
    assert read_timeline(clip).lost_after == ()
    packets = packets_of(clip)
    overwrite(clip, packets[14][0], bytes(packets[16][0] - packets[14][0]))
    timeline = read_timeline(clip)
    assert timeline.num_frames < 48
    assert timeline.lost_after
    assert timeline.loss_between(0, timeline.num_frames - 1) == "the file has lost packets"
    assert timeline.loss_between(0, 5) is None


def test_decoding_from_memory_finds_the_same_damage(tmp_path):
    clip = make_textured_clip(tmp_path / "clip.mp4")
    position, size, _ = packets_of(clip)[26]
    overwrite(clip, position + size // 3, np.random.default_rng(0).bytes(size // 2))
    file = VideoReader(VideoOptions(), "center", frame_step=1).load(clip)
    timeline = read_timeline(file)
    frames = read_frames(file, timeline, range(48), lambda pixels: pixels.shape)
    assert frames.damage == decode(clip).damage
