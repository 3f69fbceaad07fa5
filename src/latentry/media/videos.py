"""Clips: which frames there are, and the few that are wanted, as they should look.

A frame is found by its time stamp, never by multiplying a number with a rate: rates vary. Packets are
listed first (nothing is decoded for that), then each wanted frame is decoded from the nearest key frame
before it, so forty frames of a film cost forty short stretches. Frames go through the caller's function as
they come and are dropped: memory does not grow with the length of the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from latentry.errors import MediaError
from latentry.media.images import Pixels

T = TypeVar("T")

_BT709, _BT601, _BT2020 = 1, 5, 9  # numbers of swscale's colour matrices
_MATRIX = {1: _BT709, 4: _BT601, 5: _BT601, 6: _BT601, 7: _BT709, 9: _BT2020, 10: _BT2020}
_HD_HEIGHT = 720


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What a file says of its video, and its first frame confirms."""

    width: int
    """As shown, that is, after its rotation."""
    height: int
    num_frames: int
    last_frame_s: float | None
    """When the last frame is shown, counted from the first; None if the file gives no time stamps."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the frames of a clip are shown, in order, and which of them can be decoded on their own."""

    stamps: tuple[int, ...]
    """In units of ``seconds_per_unit``; empty if the file gives none, or gives one twice."""
    key_stamps: tuple[int, ...]
    seconds_per_unit: float
    num_packets: int

    @property
    def num_frames(self) -> int:
        return len(self.stamps) or self.num_packets

    def time_s(self, frame: int) -> float:
        """When this frame is shown, counted from the first."""
        return (self.stamps[frame] - self.stamps[0]) * self.seconds_per_unit


def probe_video(path: Path) -> VideoInfo:
    """Size, frames and length: one frame is decoded, the packets are counted.

    What headers say of the number of frames is not believed: fragments, edit lists and cut-off tails all make
    it wrong.
    """
    with _opened(path) as (container, stream):
        frame = next(container.decode(stream), None)
        if frame is None:
            raise MediaError("has no frame that can be decoded")
        height, width = _upright_shape(frame, _shown_width(frame, stream))
    timeline = read_timeline(path)
    last_s = timeline.time_s(timeline.num_frames - 1) if timeline.stamps else None
    return VideoInfo(width, height, timeline.num_frames, last_s)


def read_timeline(path: Path) -> Timeline:
    """List the packets of the video stream, decoding nothing."""
    stamps: list[int | None] = []
    keys: list[int] = []
    with _opened(path) as (container, stream):
        for packet in container.demux(stream):
            if packet.size == 0:
                continue
            if packet.is_keyframe and packet.pts is not None:
                keys.append(packet.pts)
            if not packet.is_discard:  # before an edit list's beginning: decoded, but never shown
                stamps.append(packet.pts)
        unit = float(stream.time_base)
    known = sorted(stamp for stamp in stamps if stamp is not None)
    if len(known) != len(stamps) or len(set(known)) != len(known) or not keys:
        known = []
    return Timeline(tuple(known), tuple(sorted(keys)), unit, len(stamps))


def read_frames(
    path: Path, timeline: Timeline, wanted: Sequence[int], keep: Callable[[Pixels], T]
) -> list[T]:
    """``keep(frame)`` for each wanted frame number, in the order asked for.

    Numbers may repeat. Frames are decoded from the key frames before them; where a file's time stamps
    cannot be relied on, from its beginning.
    """
    if not wanted:
        return []
    numbers = sorted(set(wanted))
    found: dict[int, T] = {}
    if timeline.stamps:
        found = _by_stamp(path, timeline, numbers, keep)
    if len(found) < len(numbers):
        found = _by_counting(path, numbers, keep)
    missing = [number for number in numbers if number not in found]
    if missing:
        raise MediaError(
            f"has {timeline.num_frames} frames, but frame {missing[0]} cannot be decoded: "
            "the file is damaged or cut short"
        )
    return [found[number] for number in wanted]


def _by_stamp(
    path: Path, timeline: Timeline, numbers: Sequence[int], keep: Callable[[Pixels], T]
) -> dict[int, T]:
    found: dict[int, T] = {}
    number_at = {timeline.stamps[number]: number for number in numbers}
    with _opened(path) as (container, stream):
        frames: Iterator[Any] = iter(())
        position = None
        for number in numbers:
            if number in found:
                continue
            stamp = timeline.stamps[number]
            key_index = bisect_right(timeline.key_stamps, stamp) - 1
            key = timeline.key_stamps[max(0, key_index)]
            if position is None or key > position:
                container.seek(key, stream=stream, backward=True, any_frame=False)
                frames = container.decode(stream)
            for frame in frames:
                position = frame.pts
                if position in number_at and number_at[position] not in found:
                    found[number_at[position]] = keep(_to_rgb(frame, stream))
                if position is None or position >= stamp:
                    break
            if number not in found:
                return {}  # the stamps did not lead there: count instead
    return found


def _by_counting(path: Path, numbers: Sequence[int], keep: Callable[[Pixels], T]) -> dict[int, T]:
    wanted, last = set(numbers), max(numbers)
    found: dict[int, T] = {}
    with _opened(path) as (container, stream):
        try:
            for number, frame in enumerate(container.decode(stream)):
                if number in wanted:
                    found[number] = keep(_to_rgb(frame, stream))
                if number >= last:
                    break
        except MediaError:
            raise
        except Exception:  # what was decoded before the damage is still good
            return found
    return found


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """The container and its video stream; whatever goes wrong inside is the file's fault."""
    import av

    try:
        with av.open(str(path)) as container:
            streams = [s for s in container.streams.video if not _is_cover(s)]
            if not streams:
                raise MediaError("has no video stream")
            streams[0].thread_type = "AUTO"
            yield container, streams[0]
    except MediaError:
        raise
    except (av.error.FFmpegError, OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise MediaError(f"cannot be decoded: {reason}".replace("\n", " ")) from None


def _is_cover(stream: Any) -> bool:
    """Whether the stream is a still picture, such as the cover of a film."""
    import av

    return bool(stream.disposition & av.stream.Disposition.attached_pic)


# ---- pixels ---------------------------------------------------------------------------------


def _shown_width(frame: Any, stream: Any) -> int:
    """The width in square pixels: some films store theirs squeezed."""
    shape = stream.sample_aspect_ratio
    return max(1, round(frame.width * float(shape))) if shape else int(frame.width)


def _upright_shape(frame: Any, width: int) -> tuple[int, int]:
    turned = round(frame.rotation / 90) % 2 == 1
    return (width, frame.height) if turned else (frame.height, width)


def _to_rgb(frame: Any, stream: Any) -> Pixels:
    """Eight-bit RGB in square pixels, upright, progressive, by the frame's own colour matrix and range."""
    matrix = _MATRIX.get(int(frame.colorspace), _BT709 if frame.height >= _HD_HEIGHT else _BT601)
    full_range = int(frame.color_range) == 2 or frame.format.name.startswith("yuvj")
    rgb = frame.reformat(
        format="rgb24",
        width=_shown_width(frame, stream),
        height=frame.height,
        src_colorspace=matrix,
        dst_colorspace=matrix,
        src_color_range=2 if full_range else 1,
        dst_color_range=2,
    )
    pixels: Pixels = rgb.to_ndarray()
    if frame.interlaced_frame:
        pixels = _without_combing(pixels)
    upright: Pixels = np.ascontiguousarray(np.rot90(pixels, k=round(frame.rotation / 90) % 4))
    return upright


def _without_combing(pixels: Pixels) -> Pixels:
    """Keep the even lines, one field, and fill the others with the mean of their neighbours."""
    kept = pixels[::2].astype(np.uint16)
    below = np.concatenate([kept[1:], kept[-1:]])
    filled: Pixels = pixels.copy()
    filled[1::2] = ((kept + below + 1) // 2)[: len(filled[1::2])].astype(np.uint8)
    return filled
