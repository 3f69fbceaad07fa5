"""Which frames a video has and when they are shown, without decoding.

A frame is found by its time stamp, not by multiplying its number by a frame rate, because rates vary. The frame count of
the header is not used: fragments, edit lists and truncated files all make it wrong. Instead all packets are listed. For
MP4 and MOV files on disk this reads the header only; for other formats it reads the whole file.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from latentry.media.clips.indexed_file import IndexedFile
from latentry.media.clips.matroska_gaps import MatroskaGaps
from latentry.media.clips.video_file import open_video
from latentry.media.content import MediaFile

_MOV, _MATROSKA = "mov", "matroska"


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the frames of a video are shown, in order, and which of them are key frames."""

    stamps: tuple[int, ...]
    """One per frame, in units of ``seconds_per_unit``; empty if time stamps are missing or repeated."""
    key_stamps: tuple[int, ...]
    """The time stamps of the key frames, from which decoding can start."""
    key_targets: tuple[int, ...]
    """Where to seek for each key frame. Some formats seek by the time of decoding, which is earlier."""
    seconds_per_unit: float
    num_packets: int
    lost_after: tuple[int, ...] = ()
    """The time stamps of frames that are followed by packets which the file has lost."""
    from_index: bool = field(default=False, compare=False)
    """Whether the index of the file was enough, so that the packets were not read."""

    @property
    def num_frames(self) -> int:
        return len(self.stamps) or self.num_packets

    def times_s(self) -> npt.NDArray[np.float64] | None:
        """When each frame is shown, in seconds after the first; None if the time stamps are unusable."""
        if not self.stamps:
            return None
        stamps = np.array(self.stamps, dtype=np.float64)
        times: npt.NDArray[np.float64] = (stamps - stamps[0]) * self.seconds_per_unit
        return times

    def loss_between(self, first: int, last: int) -> str | None:
        """Whether the file has lost packets between two frames, in words."""
        for stamp in self.lost_after:
            if self.stamps and self.stamps[first] <= stamp < self.stamps[last]:
                return "the file has lost packets"
        return None

    def key_before(self, stamp: int) -> tuple[int, int]:
        """The time stamp of the key frame from which a frame is decoded, and where to seek for it."""
        number = max(0, bisect_right(self.key_stamps, stamp) - 1)
        return self.key_stamps[number], self.key_targets[number]

    def key_after(self, stamp: int) -> float:
        """The time stamp of the next key frame; infinity if there is none."""
        number = bisect_right(self.key_stamps, stamp)
        return self.key_stamps[number] if number < len(self.key_stamps) else float("inf")


def read_timeline(source: Path | MediaFile) -> Timeline:
    """List the packets of the video stream, decoding nothing."""
    if isinstance(source, MediaFile):
        return list_packets(source) if source.content is not None else _timeline_of_large(source)
    with closing(IndexedFile(source)) as file:
        return list_packets(file)


@lru_cache(maxsize=16)
def _timeline_of_large(file: MediaFile) -> Timeline:
    """The timeline of a file on disk. It is kept, because a long film gives many samples."""
    return read_timeline(file.path)


def list_packets(source: MediaFile | IndexedFile) -> Timeline:
    """The timeline of an open file, from its index if it is an ``IndexedFile`` that has one."""
    num_indexed = 0
    stamps: list[int | None] = []
    keys: list[tuple[int, int]] = []
    lost_after: list[int] = []
    with open_video(source) as (container, stream):
        if isinstance(source, IndexedFile):
            num_indexed = _skip_packets(source, container, stream)
            if not num_indexed:
                return list_packets(MediaFile(Path(source.name), "", None))
        gaps = None
        formats = container.format.name.split(",")
        by_pts = _MOV in formats or _MATROSKA in formats
        if _MATROSKA in formats:
            gaps = MatroskaGaps(lambda position, size: _read_part(source, position, size))
        gap_found = False
        for packet in container.demux() if gaps else container.demux(stream):
            if packet.size == 0:
                continue
            if gaps and gaps.comes_before(packet.pos, packet.size):
                gap_found = True
            if packet.stream_index != stream.index:
                continue
            if gap_found:
                lost_after.append(max((stamp for stamp in stamps if stamp is not None), default=0))
                gap_found = False
            if packet.is_keyframe and packet.pts is not None:
                keys.append((packet.pts, packet.pts if by_pts or packet.dts is None else packet.dts))
            if not packet.is_discard:  # packets before the start of an edit list are decoded but not shown
                stamps.append(packet.pts)
        unit = float(stream.time_base)
    known = sorted(stamp for stamp in stamps if stamp is not None)
    keys.sort()
    if len(known) != len(stamps) or len(set(known)) != len(known) or not keys:
        known = []
    known = (
        known[bisect_right(known, keys[0][0] - 1) :] if known else known
    )  # players start at a key frame too
    return Timeline(
        stamps=tuple(known),
        key_stamps=tuple(stamp for stamp, _ in keys),
        key_targets=tuple(target for _, target in keys),
        seconds_per_unit=unit,
        num_packets=len(stamps),
        lost_after=tuple(lost_after),
        from_index=0 < len(stamps) <= num_indexed,
    )


def _read_part(source: MediaFile | IndexedFile, position: int, size: int) -> bytes:
    if isinstance(source, MediaFile) and source.content is not None:
        return source.content[position : position + size]
    with open(source.path if isinstance(source, MediaFile) else source.name, "rb") as file:
        file.seek(position)
        return file.read(size)


def _skip_packets(file: IndexedFile, container: Any, stream: Any) -> int:
    """Skip the data of the packets in the container's index. Returns how many the index has for the stream."""
    if _MOV not in container.format.name.split(","):
        return 0
    file.skip_packets(container.streams)
    return len(stream.index_entries)
