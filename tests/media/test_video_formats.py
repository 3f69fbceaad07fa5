"""Endings, containers and tags: a file is what its content says."""

from __future__ import annotations

import av
import pytest
from clip_files import make_textured_clip, overwrite
from helpers import read_counters
from PIL import Image

from latentry.errors import MediaError
from latentry.media.clips.frames import probe_video
from latentry.media.video_options import VideoOptions
from latentry.media.video_reader import VIDEO_SUFFIXES, VideoReader

ENDINGS = {
    "m4v": ("libx264", "yuv420p", "mp4"),
    "mpg": ("mpeg1video", "yuv420p", None),
    "mpeg": ("mpeg2video", "yuv420p", None),
    "ts": ("libx264", "yuv420p", None),
    "mts": ("libx264", "yuv420p", "mpegts"),
    "m2ts": ("libx264", "yuv420p", "mpegts"),
    "3gp": ("mpeg4", "yuv420p", None),
    "ogv": ("libvpx", "yuv420p", "ogg"),
    "gif": ("gif", "rgb8", None),
    "apng": ("apng", "rgb24", None),
    "wmv": ("wmv2", "yuv420p", None),
    "flv": ("flv", "yuv420p", None),
}


def counter_clip(path, codec, pixel_format, container, num_frames=24):
    from latentry.testing.media import counter_frame

    return make_textured_clip(
        path, num_frames, codec=codec, pixel_format=pixel_format, container=container, frame=counter_frame
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_more_endings(tmp_path, ending):
    assert f".{ending}" in VIDEO_SUFFIXES
    clip = counter_clip(tmp_path / f"clip.{ending}", *ENDINGS[ending])
    info = probe_video(clip)
    assert (info.width, info.height, info.num_frames) == (96, 64, 24)
    assert read_counters(clip, [23, 0, 11]) == [23, 0, 11]
    assert read_counters(clip, list(range(24))) == list(range(24))


@pytest.mark.parametrize("ending", ["mkv", "mp4", "avi", "mpg", "gif", "ts", "flv", "ogv"])
def test_the_content_decides_whatever_the_ending(tmp_path, ending):
    for container, codec in (
        ("mov", "libx264"),
        ("matroska", "libx264"),
        ("avi", "mpeg4"),
        ("mpegts", "mpeg2video"),
    ):
        clip = counter_clip(tmp_path / f"{container}.{ending}", codec, "yuv420p", container)
        assert read_counters(clip, [23, 0, 11]) == [23, 0, 11]


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.avi"])
def test_tags_that_are_not_utf8(tmp_path, name):
    clip = tmp_path / name
    with av.open(str(clip), "w") as container:
        container.metadata["title"] = "a title of Latin letters"
        container.metadata["artist"] = "somebody or other"
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for _ in range(12):
            container.mux(stream.encode(av.VideoFrame(96, 64, "yuv420p")))
        container.mux(stream.encode(None))
    overwrite(clip, clip.read_bytes().index(b"a title of Latin"), b"\xfc\xe4\xf6\xff\xfe")
    with pytest.raises(UnicodeDecodeError), av.open(str(clip)):
        pass
    assert probe_video(clip).num_frames == 12
    assert len(read_counters(clip, [0, 11])) == 2


@pytest.mark.parametrize("target_frames", [None, 5])
def test_what_is_no_video_is_named(tmp_path, target_frames):
    reader = VideoReader(VideoOptions(target_frames=target_frames), "center", 4)
    Image.new("RGB", (64, 48), "red").save(tmp_path / "still.gif")
    Image.new("RGB", (64, 48), "red").save(tmp_path / "photo.jpg")
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "page.mp4").write_text("<!doctype html><title>Not found</title>")
    for name, reason in {
        "still.gif": r"^is an image \(GIF\), not a video; encode it with: latentry image$",
        "photo.jpg": r"^is an image \(JPEG\), not a video; encode it with: latentry image$",
        "empty.mp4": "^is empty$",
        "page.mp4": "^is an HTML page, not a video$",
    }.items():
        with pytest.raises(MediaError, match=reason):
            reader.probe(tmp_path / name)


def test_a_playlist_reaches_no_other_machine(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n")
    with pytest.raises(MediaError):
        probe_video(path)
