"""What listing the frames of a large MP4 file reads and takes, compared with reading all of its packets.

    python benchmarks/list_frames.py [--gigabytes 2]

The film is one encoded frame, repeated. Its pages are dropped from the page cache before each measurement.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import av
import numpy as np

from latentry.media.clips.indexed_file import IndexedFile
from latentry.media.clips.timeline import Timeline, list_packets
from latentry.media.content import MediaFile


def make_film(path: Path, num_bytes: int) -> Path:
    """An MP4 file of about this size, with packets of about 150 kB."""
    noise = np.random.default_rng(0).integers(0, 256, (720, 1280, 3), np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=25, options={"qmin": "20", "qmax": "20"})
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuvj420p"
        (packet,) = stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24"))
        content, unit = bytes(packet), packet.time_base
        for number in range(num_bytes // len(content)):
            copy = av.Packet(content)
            copy.stream, copy.time_base = stream, unit
            copy.pts = copy.dts = number * int(1 / (25 * unit))
            copy.is_keyframe = True
            container.mux(copy)
    return path


def cold_s(path: Path, work: Callable[[], object]) -> float:
    """Seconds, with the file out of the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        film = make_film(Path(folder) / "film.mp4", int(options.gigabytes * 1e9))
        found: list[Timeline] = []
        with closing(IndexedFile(film)) as file:
            index_s = cold_s(film, lambda: found.append(list_packets(file)))
            num_bytes = file.num_bytes_read
        all_s = cold_s(film, lambda: found.append(list_packets(MediaFile(film, "", None))))
        assert found[0] == found[1]
        size = film.stat().st_size
    print(
        f"{found[0].num_frames:,} frames in {size / 1e9:.1f} GB: from the index {index_s:.2f} s and "
        f"{num_bytes / 1e6:.1f} MB read; all packets {all_s:.2f} s: {all_s / index_s:.1f}x in time, "
        f"{size / num_bytes:,.0f}x in bytes"
    )


if __name__ == "__main__":
    main()
