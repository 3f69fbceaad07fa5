"""Videos: which frames a file has, and the pixels of the frames that are wanted.

A frame is found by its time stamp, not by multiplying its number by a frame rate, because rates vary. First all
packets are listed, which decodes nothing. Then each wanted frame is decoded from the nearest key frame before it, so
forty frames of a film cost forty short decodes. Each frame is handed to the caller's function and then dropped, so
memory does not grow with the length of the file.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from latentry.errors import MediaError
from latentry.media.content import MediaFile
from latentry.media.images import Pixels

T = TypeVar("T")

_BT709, _BT601, _BT2020 = 1, 5, 9  # swscale's numbers of colour matrices
_MATRIX = {1: _BT709, 4: _BT601, 5: _BT601, 6: _BT601, 7: _BT709, 9: _BT2020, 10: _BT2020}
_HD_HEIGHT = 720
_READ_BYTES = 1 << 20
"""What FFmpeg reads from memory at a time. Each read needs the GIL, so there should be few."""


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What planning needs to know about a video."""

    width: int
    """As shown, after rotation and in square pixels."""
    height: int
    num_frames: int
    last_frame_s: float | None
    """When the last frame is shown, in seconds after the first; None if the file has no usable time stamps."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the frames of a video are shown, in order, and which of them are key frames."""

    stamps: tuple[int, ...]
    """One per frame, in units of ``seconds_per_unit``; empty if time stamps are missing or repeated."""
    key_stamps: tuple[int, ...]
    """The time stamps of the key frames, from which decoding can start."""
    seconds_per_unit: float
    num_packets: int

    @property
    def num_frames(self) -> int:
        return len(self.stamps) or self.num_packets

    def time_s(self, frame: int) -> float:
        """When this frame is shown, in seconds after the first."""
        return (self.stamps[frame] - self.stamps[0]) * self.seconds_per_unit


def probe_video(path: Path) -> VideoInfo:
    """Size, number of frames and length of a video: decodes one frame and lists the packets.

    The frame count of the header is not used: fragments, edit lists and truncated files all make it wrong.
    """
    with _opened(path) as (container, stream):
        frame = next(container.decode(stream), None)
        if frame is None:
            raise MediaError("has no frame that can be decoded")
        height, width = _upright_shape(frame, _shown_width(frame, stream))
    timeline = read_timeline(path)
    last_s = timeline.time_s(timeline.num_frames - 1) if timeline.stamps else None
    return VideoInfo(width, height, timeline.num_frames, last_s)


def read_timeline(source: Path | MediaFile) -> Timeline:
    """List the packets of the video stream, decoding nothing."""
    stamps: list[int | None] = []
    keys: list[int] = []
    with _opened(source) as (container, stream):
        for packet in container.demux(stream):
            if packet.size == 0:
                continue
            if packet.is_keyframe and packet.pts is not None:
                keys.append(packet.pts)
            if not packet.is_discard:  # packets before the start of an edit list are decoded but not shown
                stamps.append(packet.pts)
        unit = float(stream.time_base)
    known = sorted(stamp for stamp in stamps if stamp is not None)
    if len(known) != len(stamps) or len(set(known)) != len(known) or not keys:
        known = []
    return Timeline(tuple(known), tuple(sorted(keys)), unit, len(stamps))


def read_frames(
    source: Path | MediaFile, timeline: Timeline, wanted: Sequence[int], keep: Callable[[Pixels], T]
) -> list[T]:
    """Decode some frames and return ``keep(frame)`` for each, in the order of ``wanted``.

    Args:
        source: The video.
        timeline: What ``read_timeline`` returned for it.
        wanted: Frame numbers, in any order. They may repeat.
        keep: Called once per distinct frame. What it returns stays in memory; the frame does not.

    Frames are decoded from the key frames before them, or from the beginning where time stamps are unusable.
    """
    if not wanted:
        return []
    numbers = sorted(set(wanted))
    found: dict[int, T] = {}
    if timeline.stamps:
        found = _by_stamp(source, timeline, numbers, keep)
    if len(found) < len(numbers):
        found = _by_counting(source, numbers, keep)
    missing = [number for number in numbers if number not in found]
    if missing:
        raise MediaError(
            f"has {timeline.num_frames} frames, but frame {missing[0]} cannot be decoded: "
            "the file is damaged or truncated"
        )
    return [found[number] for number in wanted]


def _by_stamp(
    source: Path | MediaFile, timeline: Timeline, numbers: Sequence[int], keep: Callable[[Pixels], T]
) -> dict[int, T]:
    """Seek to the frames by time stamp. Empty if a frame does not have the time stamp that its packet states."""
    found: dict[int, T] = {}
    number_at = {timeline.stamps[number]: number for number in numbers}
    with _opened(source) as (container, stream):
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
                return {}
    return found


def _by_counting(
    source: Path | MediaFile, numbers: Sequence[int], keep: Callable[[Pixels], T]
) -> dict[int, T]:
    """Decode from the beginning and count. Has the frames before the first damaged one."""
    wanted, last = set(numbers), max(numbers)
    found: dict[int, T] = {}
    with _opened(source) as (container, stream):
        try:
            for number, frame in enumerate(container.decode(stream)):
                if number in wanted:
                    found[number] = keep(_to_rgb(frame, stream))
                if number >= last:
                    break
        except MediaError:
            raise
        except Exception:  # damaged from here on; the caller reports the frames that are missing
            return found
    return found


class _NamedBytes(io.BytesIO):
    """Bytes with a file name, whose extension helps FFmpeg to recognise the format."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


@contextmanager
def _opened(source: Path | MediaFile) -> Iterator[tuple[Any, Any]]:
    """The container and its video stream. Errors inside the block become a ``MediaError``."""
    import av

    file: str | _NamedBytes
    if isinstance(source, Path):
        file = str(source)
    elif source.content is None:
        file = str(source.path)
    else:
        file = _NamedBytes(source.content, str(source.path))
    try:
        with av.open(file, buffer_size=_READ_BYTES) as container:
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
    """Whether the stream is a still image, such as a film's cover."""
    import av

    return bool(stream.disposition & av.stream.Disposition.attached_pic)


# ---- pixels ---------------------------------------------------------------------------------


def _shown_width(frame: Any, stream: Any) -> int:
    """The width in square pixels: some videos store pixels that are not square."""
    shape = stream.sample_aspect_ratio
    return max(1, round(frame.width * float(shape))) if shape else int(frame.width)


def _upright_shape(frame: Any, width: int) -> tuple[int, int]:
    """(height, width) after rotation."""
    turned = round(frame.rotation / 90) % 2 == 1
    return (width, frame.height) if turned else (frame.height, width)


def _to_rgb(frame: Any, stream: Any) -> Pixels:
    """8-bit RGB in square pixels, upright and deinterlaced, using the frame's own colour matrix and range."""
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
        pixels = _deinterlaced(pixels)
    upright: Pixels = np.ascontiguousarray(np.rot90(pixels, k=round(frame.rotation / 90) % 4))
    return upright


def _deinterlaced(pixels: Pixels) -> Pixels:
    """Keep the even lines, which are one field, and replace the others by the mean of their neighbours."""
    kept = pixels[::2].astype(np.uint16)
    below = np.concatenate([kept[1:], kept[-1:]])
    filled: Pixels = pixels.copy()
    filled[1::2] = ((kept + below + 1) // 2)[: len(filled[1::2])].astype(np.uint8)
    return filled
