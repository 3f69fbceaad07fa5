"""A file whose packets can be listed without reading them.

FFmpeg takes the time stamps of MP4 and MOV packets from the index in the header, but it reads the data of every packet
on the way. Listing a film would read all of it. This file object returns zeros for the parts that the index says are
packet data. Everything else is read from the disk, so fragments, edit lists and a truncated end give the same list as
reading the whole file.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable
from io import SEEK_CUR, SEEK_END, SEEK_SET
from pathlib import Path
from typing import Any

import numpy as np

_ZEROS = bytes(1 << 20)


class IndexedFile:
    """A read-only file. After ``skip_packets``, the data of packets reads as zeros."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - close() closes it
        self._size = os.fstat(self._file.fileno()).st_size
        self._position = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.num_bytes_read = 0
        """Bytes that were read from the disk."""

    def skip_packets(self, streams: Iterable[Any]) -> None:
        """From now on, read the packets in the index of these streams as zeros."""
        ranges = [
            (entry.pos, entry.pos + entry.size)
            for stream in streams
            for entry in stream.index_entries
            if entry.size > 0 and entry.pos >= 0
        ]
        if not ranges:
            return
        bounds = np.array(sorted(ranges), dtype=np.int64)
        reached = np.maximum.accumulate(bounds[:, 1])
        first = np.flatnonzero(np.concatenate([[True], bounds[1:, 0] > reached[:-1]]))
        self._starts = bounds[first, 0].tolist()
        self._ends = reached[np.concatenate([first[1:] - 1, [len(reached) - 1]])].tolist()

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; none at the end of the file."""
        size = min(size, self._size - self._position)
        if size <= 0:
            return b""
        number = bisect_right(self._starts, self._position) - 1
        if number >= 0 and self._position < self._ends[number]:
            size = min(size, self._ends[number] - self._position, len(_ZEROS))
            self._position += size
            return _ZEROS[:size]
        if number + 1 < len(self._starts):
            size = min(size, self._starts[number + 1] - self._position)
        self._file.seek(self._position)
        found = self._file.read(size)
        self._position += len(found)
        self.num_bytes_read += len(found)
        return found

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Move to a position, as files do."""
        self._position = offset + {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def close(self) -> None:
        """Close the file."""
        self._file.close()
