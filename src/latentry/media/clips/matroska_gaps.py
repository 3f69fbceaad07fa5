"""Where a Matroska or WebM file lost packets.

After a damaged element, FFmpeg continues at the next cluster and tells nobody. The packets in between are missing from
the list, and the frames after them may refer to them. But the packets of an intact file lie one after another, with a
few bytes of headers between them. A larger gap means lost packets, unless another element fills it.
"""

from __future__ import annotations

from collections.abc import Callable

_MAX_HEADER_BYTES = 1024
_OTHER_ELEMENTS = (
    b"\x1c\x53\xbb\x6b",  # Cues
    b"\x12\x54\xc3\x67",  # Tags
    b"\x11\x4d\x9b\x74",  # SeekHead
    b"\x10\x43\xa7\x70",  # Chapters
    b"\x19\x41\xa4\x69",  # Attachments
    b"\x15\x49\xa9\x66",  # Info
    b"\x16\x54\xae\x6b",  # Tracks
    b"\x75\xa1",  # BlockAdditions, such as transparency
    b"\xec",  # Void
)
_LONGEST_HEADER = 32


class MatroskaGaps:
    """Looks for gaps between packets.

    Args:
        read: Returns some bytes of the file, given a position and a number of bytes.
    """

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._end: int | None = None

    def comes_before(self, position: int | None, size: int) -> bool:
        """Whether packets are missing before this one. Call it for all packets of all streams, in order."""
        if position is None or position < 0:
            return False
        end, self._end = self._end, max(self._end or 0, position + size)
        if end is None or position - end <= _MAX_HEADER_BYTES:
            return False
        following = self._read(end, _LONGEST_HEADER)
        return not any(element in following for element in _OTHER_ELEMENTS)
