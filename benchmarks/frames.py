"""Time and memory to read forty frames of a two-hour film, compared with decoding all of it.

    python benchmarks/frames.py [--minutes 120]

The film is one encoded minute of 1080p, repeated without encoding it again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MEASURE = """
import sys, time
from pathlib import Path
import av
def peak_mb():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) / 1024
from latentry.media.clips.windows import evenly_spaced
from latentry.media.clips.timeline import read_timeline
from latentry.media.clips.frames import read_frames
before = peak_mb()
start = time.perf_counter()
film = Path(sys.argv[1])
timeline = read_timeline(film)
listed = time.perf_counter() - start
read_frames(film, timeline, evenly_spaced(timeline.num_frames, 40), lambda pixels: pixels[::8, ::8].copy())
total = time.perf_counter() - start
print(timeline.num_frames, listed, total, peak_mb() - before)
"""


def make_film(folder: Path, minutes: int) -> Path:
    import av

    from latentry.testing import make_counter_clip

    minute = make_counter_clip(
        folder / "minute.mp4",
        1500,
        size=(1920, 1080),
        gop_size=250,
        options={"preset": "ultrafast", "bf": "2"},
    )
    film = folder / "film.mp4"
    with av.open(str(minute)) as source, av.open(str(film), "w") as target:
        template = source.streams.video[0]
        stream = target.add_stream_from_template(template)
        packets = [packet for packet in source.demux(template) if packet.size]
        stamps = [(packet.pts, packet.dts) for packet in packets]
        length = max(pts for pts, _ in stamps) + packets[0].duration
        for i in range(minutes):
            for packet, (pts, dts) in zip(packets, stamps, strict=True):
                packet.stream = stream
                packet.pts, packet.dts = pts + i * length, dts + i * length
                target.mux(packet)
                packet.time_base = template.time_base
    return film


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, default=120)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        film = make_film(Path(folder), options.minutes)
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(film)], capture_output=True, text=True, check=True
        )
        frames, listed_s, total_s, memory_mb = map(float, done.stdout.split())
        import av

        start = time.perf_counter()
        with av.open(str(film)) as container:
            container.streams.video[0].thread_type = "AUTO"
            for number, _ in enumerate(container.decode(video=0)):
                if number == 1499:
                    break
        minute_s = time.perf_counter() - start
    all_s = minute_s * options.minutes
    print(
        f"{frames:,.0f} frames of 1080p: 40 of them in {total_s:.1f} s ({listed_s:.1f} s to list packets), ",
        end="",
    )
    print(
        f"{memory_mb:.0f} MB of memory beyond the imports; decoding all frames would take {all_s:.0f} s: {all_s / total_s:.0f}x"
    )


if __name__ == "__main__":
    main()
