"""Opening a cache of ten million rows, against ``json.load`` into dictionaries.

    python benchmarks/open_cache.py [--rows 10000000] [--folder /tmp/rows]

Writes the metadata of such a cache (about 5 GB), then opens it three ways, each in a process of its
own: the usual way, from the JSON shards, and from the index that this leaves behind.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import tempfile
import time
from pathlib import Path

SHARD_SIZE = 10_000
RESOLUTIONS = [(width, height) for width in range(256, 896, 64) for height in (512, 768, 1024)]


def write_metadata(folder: Path, num_rows: int) -> None:
    rng = random.Random(0)
    shards = []
    for start in range(0, num_rows, SHARD_SIZE):
        rows = []
        for i in range(start, min(start + SHARD_SIZE, num_rows)):
            width, height = RESOLUTIONS[i % len(RESOLUTIONS)]
            rows.append(
                f"""  {{
    "cache_file": "/data/cache/{width}x{height}/{rng.getrandbits(128):032x}.meta",
    "image_path": "/data/photos/part_{start:08d}/photo_{i:08d}.jpg",
    "bucket_resolution": [
      {width},
      {height}
    ],
    "original_resolution": [
      {3 * width},
      {3 * height}
    ],
    "prompt": "a photograph of a cat on a wooden table near the window, soft light, number {i}",
    "bucket_id": {i % len(RESOLUTIONS)},
    "aspect_ratio": {width / height},
    "pixels": {width * height},
    "model_type": "flux"
  }}"""
            )
        shards.append(f"metadata_shard_{len(shards):04d}.json")
        (folder / shards[-1]).write_text("[\n" + ",\n".join(rows) + "\n]")
    metadata = {"model_type": "flux", "total_items": num_rows, "shards": shards}
    (folder / "metadata.json").write_text(json.dumps(metadata))


def open_usual(folder: Path) -> int:
    rows = []
    for shard in json.loads((folder / "metadata.json").read_text())["shards"]:
        with open(folder / shard) as file:
            rows.extend(json.load(file))
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(tuple(row["bucket_resolution"]), []).append(i)
    return len(rows)


def open_latentry(folder: Path) -> int:
    from latentry.serve.dataset import TextToImageDataset

    return len(TextToImageDataset(folder))


def measure(way: str, folder: Path, queue: multiprocessing.Queue) -> None:
    if way != "usual":
        import latentry.serve.dataset  # noqa: F401 - the imports are not part of opening
    before = peak_mb()
    start = time.perf_counter()
    (open_usual if way == "usual" else open_latentry)(folder)
    elapsed = time.perf_counter() - start
    queue.put((elapsed, peak_mb() - before))


def peak_mb() -> float:
    """This process's own peak; what getrusage reports would include its parent's."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def run(way: str, label: str, folder: Path) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=measure, args=(way, folder, queue))
    process.start()
    seconds, memory_mb = queue.get()
    process.join()
    print(f"{label:42s} {seconds:8.2f} s   {memory_mb:8.0f} MB", flush=True)
    return seconds, memory_mb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        write_metadata(folder, options.rows)
        print(f"{options.rows:,d} rows")
        usual = run("usual", "json.load into dictionaries", folder)
        shards = run("shards", "latentry, first opening (JSON shards)", folder)
        index = run("index", "latentry, later openings (index.arrow)", folder)
        print(
            f"ratios: first opening {usual[0] / shards[0]:.1f}x quicker, {usual[1] / shards[1]:.1f}x smaller; ",
            end="",
        )
        print(f"later {usual[0] / index[0]:.0f}x quicker, {usual[1] / max(1.0, index[1]):.0f}x smaller")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
