"""Opening the index of a packed cache of a hundred million rows, in several processes at once.

    python benchmarks/open_packed.py [--rows 100000000] [--processes 2] [--folder /tmp]

Writes such an index (about 225 bytes a row; the shards it speaks of do not exist), then opens it as a dataset in
processes of their own, and looks up ten thousand random rows in each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from latentry.cache.packed_format import PACKED_VERSION, index_schema
from latentry.cache.write.packed_index import BLOCK_ROWS

SIZES = [(1024, 1024), (1152, 896), (896, 1152), (832, 1216)]
LOOKUPS = 10_000


def write_index(folder: Path, num_rows: int) -> None:
    schema = index_schema(["latents", "text"])
    counts = [num_rows // len(SIZES)] * len(SIZES)
    with pa.ipc.new_file(str(folder / "index.arrow"), schema) as writer:
        for (width, height), count in zip(SIZES, counts, strict=True):
            block = make_block(schema, f"{width}x{height}", min(count, BLOCK_ROWS))
            for start in range(0, count, BLOCK_ROWS):
                writer.write_batch(block[: min(BLOCK_ROWS, count - start)])
    latent, text = ["latent", "F16", [16, 128, 128], None], ["prompt_embeds", "BF16", [1, 512, 4096], None]
    buckets = [
        {"width": w, "height": h, "aspect_name": "square", "num_frames": None, "count": count}
        for (w, h), count in zip(SIZES, counts, strict=True)
    ]
    packed = {
        "version": PACKED_VERSION, "index": "index.arrow", "fingerprint": "0", "block_rows": BLOCK_ROWS, "parts": ["latents", "text"],
        "buckets": buckets, "layouts": [[latent], [text]], "forms": [{"keys": ["latent", "prompt_embeds"], "tuples": []}],
    }  # fmt: skip
    metadata = {"model_type": "flux", "total_items": sum(counts), "shards": [], "packed": packed}
    (folder / "metadata.json").write_text(json.dumps(metadata))


def make_block(schema: pa.Schema, folder: str, count: int) -> pa.RecordBatch:
    rng = np.random.default_rng(0)
    columns = {}
    for part, layout in (("latents", 0), ("text", 1)):
        columns |= {
            f"{part}_file": [f"{folder}/{i // 1000:08x}.{part}.safetensors" for i in range(count)],
            f"{part}_row": np.arange(count, dtype=np.uint32) % 1000,
            f"{part}_offset": np.arange(count, dtype=np.uint64) % 1000 << 20,
            f"{part}_layout": np.full(count, layout, np.uint32),
            f"{part}_checksum": rng.integers(0, 2**63, count, dtype=np.uint64),
        }
    columns |= {
        "number": np.arange(count, dtype=np.uint64),
        "form": np.zeros(count, np.uint32),
        "name": [f"{i:08x}" for i in range(count)],
        "values": ["{}"] * count,
        "row": [f'{{"prompt":"a photo of a cat, number {i}","bucket_id":3}}' for i in range(count)],
    }
    return pa.record_batch(columns, schema=schema)


def private_mb() -> float:
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty")) / 1024


def open_it(folder: Path, queue: multiprocessing.Queue) -> None:
    from latentry.serve.dataset import TextToImageDataset

    before = private_mb()
    started = time.perf_counter()
    dataset = TextToImageDataset(folder)
    opened_s = time.perf_counter() - started
    opened_mb = private_mb() - before
    rng = random.Random(0)
    started = time.perf_counter()
    for _ in range(LOOKUPS):
        row = rng.randrange(len(dataset))
        dataset.index.entry(row)
        dataset.index.row(row)
    lookup_us = (time.perf_counter() - started) / LOOKUPS * 1e6
    queue.put((opened_s, opened_mb, lookup_us, private_mb() - before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        write_index(folder, options.rows)
        os.sync()  # pages that still have to be written would count as the readers' own
        size_gb = (folder / "index.arrow").stat().st_size / 1e9
        print(f"{options.rows:,d} rows, index of {size_gb:.1f} GB", flush=True)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        processes = [context.Process(target=open_it, args=(folder, queue)) for _ in range(options.processes)]
        for process in processes:
            process.start()
        for _ in processes:
            seconds, opened_mb, lookup_us, looked_mb = queue.get(timeout=600)
            print(
                f"opened in {seconds:.3f} s with {opened_mb:.0f} MB of its own; a random row {lookup_us:.0f} us; "
                f"{looked_mb:.0f} MB of its own after {LOOKUPS:,d} of them"
            )
        for process in processes:
            process.join()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
