"""HDR clips are tone-mapped by the rule of ``latentry.media.hdr``, or skipped, never in silence."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
import pytest

from latentry.errors import MediaError
from latentry.media.clips.frames import probe_video, read_frames
from latentry.media.clips.timeline import read_timeline
from latentry.media.hdr import tone_map
from latentry.media.video_options import VideoOptions
from latentry.media.video_reader import VideoReader

TRANSFERS = {"pq": 16, "hlg": 18}
CODES = np.array([[0.2, 0.2, 0.2], [0.5, 0.5, 0.5], [0.58, 0.58, 0.58], [0.75, 0.7, 0.6]])


def make_hdr_clip(path, transfer: int, codec: str = "libx265"):
    """Four stripes of 10-bit BT.2020 code values."""
    rgb = np.repeat(np.repeat(CODES[None], 64, 0), 32, 1)
    frame = av.VideoFrame.from_ndarray((rgb * 65535).round().astype(np.uint16), format="rgb48le")
    frame = frame.reformat(
        format="yuv444p10le", src_colorspace=9, dst_colorspace=9, src_color_range=2, dst_color_range=1
    )
    with av.open(str(path), "w") as container:
        options = {"x265-params": "lossless=1:log-level=0"} if codec == "libx265" else {"qp": "0"}
        stream = container.add_stream(codec, rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = 128, 64, "yuv444p10le"
        context = stream.codec_context
        context.color_trc, context.color_primaries, context.colorspace, context.color_range = (
            transfer,
            9,
            9,
            1,
        )
        for number in range(5):
            frame.pts, frame.time_base = number, Fraction(1, 25)
            frame.color_trc, frame.color_primaries, frame.colorspace = transfer, 9, 9
            frame.color_range = 1
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv"])
def test_hdr_is_tone_mapped(tmp_path, transfer, name):
    clip = make_hdr_clip(tmp_path / name, TRANSFERS[transfer])
    assert probe_video(clip).hdr == transfer
    (frame,) = read_frames(clip, read_timeline(clip), [2], lambda pixels: pixels.astype(int)).in_order([2])
    expected = tone_map(CODES, transfer, "bt2020").astype(int)
    for stripe in range(4):
        assert np.abs(frame[32, 32 * stripe + 16] - expected[stripe]).max() <= 3
    assert frame.dtype == int
    assert frame.max() <= 255


@pytest.mark.parametrize(("transfer", "says"), [("pq", "PQ"), ("hlg", "HLG")])
def test_hdr_is_said_or_skipped(tmp_path, transfer, says):
    clip = make_hdr_clip(tmp_path / "clip.mp4", TRANSFERS[transfer])
    result = VideoReader(VideoOptions(target_frames=5), "center", frame_step=1).probe(clip)
    assert f"HDR ({says}), tone-mapped to sRGB" in result.notes
    with pytest.raises(MediaError, match=rf"is HDR \({says}\)"):
        VideoReader(VideoOptions(target_frames=5), "center", frame_step=1, hdr="skip").probe(clip)


def test_ten_bits_alone_are_no_hdr(tmp_path):
    clip = make_hdr_clip(tmp_path / "clip.mp4", 1)
    assert probe_video(clip).hdr is None
