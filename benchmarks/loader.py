"""Serves FLUX 1024p samples from a warm page cache, in random order: raw reads, this loader, the usual way.

    python benchmarks/loader.py [--samples 256] [--batch_size 8] [--workers 2] [--rounds 3] [--folder /tmp]

A sample is a latent of 16x128x128 float16 and text of 512x4096 bfloat16 (with its pooled vector): 4.7 MB. "raw" only
calls ``preadv`` on a packed cache, into the same buffers again and again. "usual" calls ``torch.load`` for each sample
and ``torch.stack`` for each batch, under PyTorch's own loader. Each way reads the whole cache twice before it is timed,
because checksums are compared only once; the first epoch is timed separately. Each way runs in its own process, so
that memory it leaves behind does not affect the others. The ways take turns, so that a machine that slows down slows
all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from latentry.cache.convert import convert_cache
from latentry.cache.index.packed_index import PackedIndex
from latentry.serve.config import build_text_to_image_multiresolution_dataloader
from latentry.serve.dataset import TextToImageDataset
from latentry.testing.caches import write_metadata

EPOCHS = 3
WAYS = ("raw", "packed", "files", "usual", "packed workers", "files workers", "usual workers")


def write_cache(folder: Path, count: int) -> None:
    """Write a cache with one file per sample, as NeMo AutoModel's tool does."""
    (folder / "1024x1024").mkdir(parents=True)
    rows = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        path = folder / "1024x1024" / f"{i:032x}.pt"
        common = {
            "image_path": f"/photos/{i}.jpg", "bucket_resolution": (1024, 1024), "original_resolution": (4000, 3000),
            "prompt": f"sample {i}", "bucket_id": 3, "aspect_ratio": 1.0, "pixels": 1 << 20, "model_type": "flux",
        }  # fmt: skip
        data = {
            "latent": torch.randn(16, 128, 128, generator=generator).half(),
            "pooled_prompt_embeds": torch.randn(1, 768, generator=generator).bfloat16(),
            "prompt_embeds": torch.randn(1, 512, 4096, generator=generator).bfloat16(),
            "crop_offset": (0, 0),
            **common,
        }
        torch.save(data, path)
        rows.append({"cache_file": str(path), **common})
    write_metadata(folder, rows, 10_000, model_type="flux")


def raw(folder: Path, batch_size: int) -> Callable[[], int]:
    dataset = TextToImageDataset(folder)
    index = dataset.index
    assert isinstance(index, PackedIndex)
    locations = [(index.location(i, "latents"), index.location(i, "text")) for i in range(len(index))]
    files = {
        location.file: os.open(folder / location.file, os.O_RDONLY) for pair in locations for location in pair
    }
    shapes = [(batch_size, location.num_bytes) for location in locations[0]]
    buffers = [[torch.empty(shape, dtype=torch.uint8).numpy() for shape in shapes] for _ in range(2)]
    rng = random.Random(0)

    def epoch() -> int:
        order = list(range(len(locations)))
        rng.shuffle(order)
        for position, i in enumerate(order):
            turn = buffers[position // batch_size % 2]
            for location, buffer in zip(locations[i], turn, strict=True):
                os.preadv(files[location.file], [buffer[position % batch_size]], location.offset)
        return len(order)

    return epoch


class UsualDataset(Dataset):
    def __init__(self, folder: Path) -> None:
        self.paths = sorted((folder / "1024x1024").iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return torch.load(self.paths[i], map_location="cpu", weights_only=True)


def usual_collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: torch.stack([s[key] for s in samples])
        for key in ("latent", "pooled_prompt_embeds", "prompt_embeds")
    }


def served(loader: Iterable[Any], size: int) -> Callable[[], int]:
    def epoch() -> int:
        for batch in loader:
            assert len(batch) > 2
        return size

    return epoch


def own_memory_mb() -> float:
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty")) / 1024


def measure(epoch: Callable[[], int]) -> dict[str, float]:
    started = time.perf_counter()
    first = epoch() / (time.perf_counter() - started)
    epoch()
    before = own_memory_mb()
    started = time.perf_counter()
    rate = sum(epoch() for _ in range(EPOCHS)) / (time.perf_counter() - started)
    return {"rate": rate, "first": first, "grown_mb": own_memory_mb() - before}


def epochs_of(way: str, folder: Path, batch_size: int, workers: int) -> Callable[[], int]:
    """A function that reads the whole cache once, in this way."""
    form, _, with_workers = way.partition(" ")
    workers = workers if with_workers else 0
    if form == "raw":
        return raw(folder / "packed", batch_size)
    if form == "usual":
        dataset = UsualDataset(folder / "files")
        usual = DataLoader(
            dataset, batch_size=batch_size, shuffle=True, collate_fn=usual_collate,
            num_workers=workers, persistent_workers=workers > 0,
        )  # fmt: skip
        return served(usual, len(dataset))
    built, _ = build_text_to_image_multiresolution_dataloader(
        cache_dir=folder / form, batch_size=batch_size, num_workers=workers
    )
    return served(built, len(built) * batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(
            json.dumps(measure(epochs_of(options.way, options.folder, options.batch_size, options.workers)))
        )
        return
    work = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        write_cache(work / "files", options.samples)
        convert_cache(work / "files", work / "packed", "packed")
        compare(work, options)
    finally:
        shutil.rmtree(work)


def compare(folder: Path, options: argparse.Namespace) -> None:
    print(
        f"{options.samples} samples, batches of {options.batch_size}, {options.workers} workers, {os.cpu_count()} cores, "
        f"Python {sys.version.split()[0]}; medians of {options.rounds} rounds"
    )
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            arguments = ["--way", way, "--folder", folder, "--batch_size", options.batch_size]
            arguments += ["--workers", options.workers]
            command = [sys.executable, __file__, *map(str, arguments)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[way].append(json.loads(output))
    rates = {way: statistics.median(result["rate"] for result in results) for way, results in found.items()}
    for way, results in found.items():
        middle = {key: statistics.median(result[key] for result in results) for key in results[0]}
        low, high = (choose(result["rate"] for result in results) for choose in (min, max))
        print(
            f"{way:20s} {middle['rate']:6.0f} samples/s ({low:.0f} to {high:.0f})   first epoch {middle['first']:6.0f}   "
            f"memory {middle['grown_mb']:+5.0f} MB"
        )
    print(
        f"packed is {rates['packed'] / rates['raw']:.0%} of raw and {rates['packed'] / rates['usual']:.1f} times the usual "
        f"way; a file each {rates['files'] / rates['usual']:.1f} times; with workers "
        + ", ".join(
            f"{form} {rates[f'{form} workers'] / rates[form]:.2f}" for form in ("packed", "files", "usual")
        )
        + " of what they are without"
    )


if __name__ == "__main__":
    main()
