"""The pixels of the wanted frames of a video, and whether the decoder complained about them.

Each wanted frame is decoded from the nearest key frame before it, so forty frames of a film cost forty short decodes.
Each frame is handed to the caller's function and then dropped, so memory does not grow with the length of the file.

Decoders conceal errors: they repeat or smear what is missing. Four signs tell: the container marks a packet as corrupt,
the decoder refuses a packet, it marks a frame as concealed, or a frame does not come out at all. What follows a damaged
frame is predicted from it, so all frames up to the next key frame count as damaged. A damaged file is decoded again in
one thread to find out which frames are concerned, and leniently for those who want to keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from latentry.errors import MediaError
from latentry.media.clips.frame_pixels import hdr_transfer, to_rgb, upright_shape
from latentry.media.clips.timeline import Timeline, read_timeline
from latentry.media.clips.video_file import error_text, open_video
from latentry.media.content import MediaFile
from latentry.media.images import Pixels

T = TypeVar("T")

_STRICT = "crccheck+bitstream+buffer"
"""What decoders check. These have no false alarms on good files."""
_EXPLODE = frozenset({"mjpeg"})
"""Decoders that notice errors and tell nobody, unless they are told to stop there."""


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What planning needs to know about a video."""

    width: int
    """As shown, after rotation and in square pixels."""
    height: int
    timeline: Timeline
    hdr: str | None
    """``pq`` or ``hlg``; None for SDR."""

    @property
    def num_frames(self) -> int:
        return self.timeline.num_frames


@dataclass(slots=True)
class Frames(Generic[T]):
    """Decoded frames by their numbers, and what is wrong with some of them."""

    kept: dict[int, T] = field(default_factory=dict)
    """What the caller keeps of each frame. Frames that cannot be decoded are missing."""
    damage: dict[int, str] = field(default_factory=dict)
    """Why a frame may be wrong, or is missing."""
    num_problems: int = 0
    """How often the decoder complained on the way to the frames."""

    def in_order(self, numbers: Sequence[int]) -> list[T]:
        """The frames of these numbers, which may repeat. Raises a ``MediaError`` if one is missing."""
        for number in numbers:
            if number not in self.kept:
                raise MediaError(f"is damaged or truncated: {self.damage[number]}")
        return [self.kept[number] for number in numbers]


def probe_video(path: Path) -> VideoInfo:
    """Size, frames and transfer function of a video: decodes one frame and lists the packets."""
    with open_video(path) as (container, stream):
        frame = next((event.frame for event in _decoded(container, stream) if event.frame is not None), None)
        if frame is None:
            raise MediaError("has no frame that can be decoded")
        height, width = upright_shape(frame, stream)
        hdr = hdr_transfer(frame)
    return VideoInfo(width, height, read_timeline(path), hdr)


def read_frames(
    source: Path | MediaFile, timeline: Timeline, wanted: Sequence[int], keep: Callable[[Pixels], T]
) -> Frames[T]:
    """Decode some frames.

    >>> frames = read_frames(path, read_timeline(path), [0, 40, 80], lambda pixels: pixels[::8, ::8].copy())
    >>> frames.in_order([0, 40, 80]), frames.damage

    Args:
        source: The video.
        timeline: What ``read_timeline`` returned for it.
        wanted: Frame numbers, in any order. They may repeat.
        keep: Called once per distinct frame, or again if the file is damaged. What it returns stays in memory; the
            frame does not.

    Frames are decoded from the key frames before them, or from the beginning where time stamps are unusable.
    """
    numbers = sorted(set(wanted))
    if not numbers:
        return Frames()
    if timeline.stamps:
        frames = _by_stamp(source, timeline, numbers, keep)
        if frames.num_problems:  # which frames are concerned?
            frames = _by_stamp(source, timeline, numbers, keep, one_thread=True)
            if len(frames.kept) < len(numbers):
                lenient = _by_stamp(source, timeline, numbers, keep, one_thread=True, lenient=True)
                frames = Frames(lenient.kept, lenient.damage | frames.damage)
            return _with_missing(frames, numbers)
        if len(frames.kept) == len(numbers):
            return frames
    frames = _by_counting(source, numbers, keep)
    if frames.num_problems:
        frames = _by_counting(source, numbers, keep, one_thread=True)
        if len(frames.kept) < len(numbers):
            lenient = _by_counting(source, numbers, keep, one_thread=True, lenient=True)
            frames = Frames(lenient.kept, lenient.damage | frames.damage)
    return _with_missing(frames, numbers)


def _with_missing(frames: Frames[T], numbers: Sequence[int]) -> Frames[T]:
    for number in numbers:
        if number not in frames.kept:
            frames.damage[number] = f"frame {number} cannot be decoded"
    return frames


def _by_stamp(
    source: Path | MediaFile,
    timeline: Timeline,
    numbers: Sequence[int],
    keep: Callable[[Pixels], T],
    *,
    one_thread: bool = False,
    lenient: bool = False,
) -> Frames[T]:
    """Seek to the frames by time stamp. Frames that do not have the time stamp of their packet are missing."""
    frames: Frames[T] = Frames()
    number_at = {timeline.stamps[number]: number for number in numbers}
    damaged: list[tuple[int, float, str]] = [
        (stamp + 1, timeline.key_after(stamp), "the file has lost packets") for stamp in timeline.lost_after
    ]
    with open_video(source) as (container, stream):
        _set_up(stream, one_thread=one_thread, lenient=lenient)
        events: Iterator[_Event] = iter(())
        position: int | None = None
        sought = timeline.key_stamps[0]

        def decode_until(stamp: int) -> int | None:
            """Decode up to a frame, keep what is wanted, and return the first time stamp that came out."""
            nonlocal position
            first = None
            for event in events:
                if event.problem is not None:
                    at = event.stamp if event.stamp is not None else max(sought, position or sought)
                    # Frames before the key frame in time but after it in the file refer to what was not decoded.
                    if at >= sought:
                        frames.num_problems += 1
                        damaged.append((at, timeline.key_after(at), event.problem))
                if event.frame is None:
                    continue
                position = event.frame.pts
                first = position if first is None else first
                if position in number_at and number_at[position] not in frames.kept:
                    frames.kept[number_at[position]] = keep(to_rgb(event.frame, stream))
                if position is None or position >= stamp:
                    break
            return first

        for number in numbers:
            if number in frames.kept:
                continue
            stamp = timeline.stamps[number]
            key, target = timeline.key_before(stamp)
            if position is not None and key <= position:
                decode_until(stamp)
                continue
            sought = key
            container.seek(target, stream=stream, backward=True, any_frame=False)
            events = _decoded(container, stream)
            first = decode_until(stamp)
            if first is not None and first > key > timeline.key_stamps[0]:
                # Some formats have no index, and seeking goes too far.
                sought, target = timeline.key_before(key - 1)
                container.seek(target, stream=stream, backward=True, any_frame=False)
                events = _decoded(container, stream)
                decode_until(stamp)
    for stamp, number in number_at.items():
        for start, end, problem in damaged:
            if start <= stamp < end:
                frames.damage.setdefault(number, f"{problem} at frame {number}")
    return frames


def _by_counting(
    source: Path | MediaFile,
    numbers: Sequence[int],
    keep: Callable[[Pixels], T],
    *,
    one_thread: bool = False,
    lenient: bool = False,
) -> Frames[T]:
    """Decode from the beginning and count. Has the frames before the first that the decoder refuses."""
    wanted, last = set(numbers), max(numbers)
    frames: Frames[T] = Frames()
    number, problem = 0, None
    with open_video(source) as (container, stream):
        _set_up(stream, one_thread=one_thread, lenient=lenient)
        for event in _decoded(container, stream):
            frames.num_problems += event.problem is not None
            problem = problem or event.problem
            if event.frame is None:
                if lenient:
                    continue
                break  # a frame is lost, so the numbers of those that follow are unknown
            if event.frame.key_frame:
                problem = event.problem
            if number in wanted:
                frames.kept[number] = keep(to_rgb(event.frame, stream))
                if problem:
                    frames.damage[number] = f"{problem} at frame {number}"
            number += 1
            if number > last:
                break
    return frames


@dataclass(frozen=True, slots=True)
class _Event:
    """A frame, a complaint, or both."""

    frame: Any | None
    stamp: int | None
    problem: str | None = None


def _decoded(container: Any, stream: Any) -> Iterator[_Event]:
    """Decode from here to the end, and go on after errors."""
    import av

    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except (av.error.FFmpegError, EOFError) as error:
            yield _Event(None, None, f"the file breaks off ({error_text(error)})")
            return
        if packet is None:
            return
        if packet.size and packet.is_corrupt:
            yield _Event(None, packet.pts, "the container marks a packet as corrupt")
        try:
            frames = packet.decode()
        except EOFError:
            return
        except av.error.FFmpegError as error:
            yield _Event(None, packet.pts, f"the decoder refuses a packet ({error_text(error)})")
            continue
        for frame in frames:
            concealed = "the decoder conceals errors" if frame.is_corrupt else None
            yield _Event(frame, frame.pts, concealed)


def _set_up(stream: Any, *, one_thread: bool, lenient: bool) -> None:
    context = stream.codec_context
    if one_thread:
        stream.thread_type, stream.thread_count = "NONE", 1
    if not lenient:
        explode = "+explode" if context.name in _EXPLODE else ""
        context.options = {"err_detect": _STRICT + explode}
