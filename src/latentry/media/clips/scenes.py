"""Scene cuts, found by PySceneDetect's content detector.

The detector compares the colours of consecutive frames. It sees every frame, so the whole video is decoded, in a small
size. Its defaults are used: a threshold of 27, and at least 15 frames between two cuts.
"""

from __future__ import annotations

from pathlib import Path

from latentry.extras import require_extra
from latentry.media.clips.timeline import Timeline
from latentry.media.clips.video_file import open_video

_WIDTH = 256
_NOMINAL_FPS = 25.0
"""The detector counts frames; the rate is only needed to name them."""


def scene_starts(path: Path, timeline: Timeline) -> list[int]:
    """The number of the first frame of each scene; the first is 0.

    Args:
        path: The video.
        timeline: What ``read_timeline`` returned for it.
    """
    require_extra("scenes")
    import av
    from scenedetect.common import FrameTimecode
    from scenedetect.detectors import ContentDetector

    detector = ContentDetector()
    number_at = {stamp: number for number, stamp in enumerate(timeline.stamps)}
    cuts: set[int] = set()
    number = -1
    with open_video(path) as (container, stream):
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except av.error.FFmpegError:  # encoding reports what is damaged
                continue
            for frame in frames:
                number = number_at.get(frame.pts, number + 1)
                height = max(1, frame.height * _WIDTH // frame.width)
                small = frame.to_ndarray(format="bgr24", width=_WIDTH, height=height)
                found = detector.process_frame(FrameTimecode(number, _NOMINAL_FPS), small)
                cuts.update(cut.frame_num for cut in found)
    return [0, *sorted(cut for cut in cuts if 0 < cut < timeline.num_frames)]
