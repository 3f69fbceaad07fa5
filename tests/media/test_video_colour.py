"""Colour matrix, colour range and interlacing."""

from __future__ import annotations

import av
import numpy as np
import pytest

from latentry.media.clips.frames import read_frames
from latentry.media.clips.timeline import read_timeline
from latentry.testing.media import counter_frame


@pytest.mark.parametrize("matrix", [1, 5])
@pytest.mark.parametrize("colour_range", [1, 2])
def test_colour_matrix_and_range(tmp_path, matrix, colour_range):
    path = tmp_path / "clip.mp4"
    rgb = av.VideoFrame.from_ndarray(np.full((64, 96, 3), (200, 40, 90), np.uint8), format="rgb24")
    frame = rgb.reformat(
        format="yuv444p",
        src_colorspace=matrix,
        dst_colorspace=matrix,
        src_color_range=2,
        dst_color_range=colour_range,
    )
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv444p"
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, colour_range
        frame.colorspace, frame.color_range, frame.pts = matrix, colour_range, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    (pixel,) = read_frames(
        path, read_timeline(path), [0], lambda pixels: pixels[30, 30].astype(int)
    ).in_order([0])
    assert np.abs(pixel - (200, 40, 90)).max() <= 3


def test_interlaced_frames_are_deinterlaced(tmp_path):
    path = tmp_path / "clip.mkv"
    woven = counter_frame(0)
    woven[::2, :48], woven[1::2, 48:] = 240, 240  # what two moments look like in one frame
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"qp": "0", "x264-params": "tff=1"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv444p"
        for number in range(3):
            frame = av.VideoFrame.from_ndarray(woven, format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    (pixels,) = read_frames(path, read_timeline(path), [1], lambda pixels: pixels.astype(int)).in_order([1])
    assert np.abs(np.diff(pixels[4:60], axis=0)).max() < 40
