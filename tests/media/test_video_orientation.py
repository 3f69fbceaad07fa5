"""Display matrices: rotation and mirroring, as they are in the header."""

from __future__ import annotations

import numpy as np
import pytest
from clip_files import make_textured_clip, set_display_matrix

from latentry.media.clips.frames import probe_video, read_frames
from latentry.media.clips.timeline import read_timeline


def corners(number: int) -> np.ndarray:
    """A frame whose four corners have different colours."""
    frame = np.zeros((64, 96, 3), np.uint8)
    frame[:32, :48], frame[:32, 48:] = (220, 30, 30), (30, 220, 30)
    frame[32:, :48], frame[32:, 48:] = (30, 30, 220), (220, 220, 30)
    return frame


MATRICES = {
    "identity": ((1, 0, 0, 1), lambda p: p),
    "mirrored": ((-1, 0, 0, 1), lambda p: p[:, ::-1]),
    "upside down": ((1, 0, 0, -1), lambda p: p[::-1]),
    "half turn": ((-1, 0, 0, -1), lambda p: p[::-1, ::-1]),
    "clockwise": ((0, 1, -1, 0), lambda p: np.rot90(p, k=-1)),
    "counter-clockwise": ((0, -1, 1, 0), lambda p: np.rot90(p, k=1)),
    "transposed": ((0, 1, 1, 0), lambda p: p.transpose(1, 0, 2)),
    "transposed, then turned": ((0, -1, -1, 0), lambda p: p.transpose(1, 0, 2)[::-1, ::-1]),
}


@pytest.mark.parametrize("name", MATRICES)
def test_display_matrix(tmp_path, name):
    (a, b, c, d), show = MATRICES[name]
    clip = make_textured_clip(
        tmp_path / "clip.mp4", 3, frame=corners, options={"qp": "0"}, pixel_format="yuv444p"
    )
    set_display_matrix(clip, a, b, c, d)
    expected = show(corners(0)).astype(int)
    info = probe_video(clip)
    assert (info.height, info.width) == expected.shape[:2]
    (frame,) = read_frames(clip, read_timeline(clip), [1], lambda pixels: pixels.astype(int)).in_order([1])
    assert frame.shape == expected.shape
    assert np.abs(frame - expected).max() < 8
