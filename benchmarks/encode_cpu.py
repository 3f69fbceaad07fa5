"""Encode images on a CPU with the embedded ``tiny`` model, compared with one at a time; and plan many files.

    python benchmarks/encode_cpu.py [--pictures 120] [--files 100000] [--folder /tmp]

The images are 12-megapixel JPEGs, made from the examples. "One at a time" is the usual script: Pillow decodes and scales
with Lanczos, the model encodes image and caption, ``torch.save``, then the next image. Planning lists a folder, looks
for captions, reads every header and assigns buckets. It decodes nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from pictures import write_pictures
from PIL import Image

from latentry.buckets import MultiTierBucketCalculator
from latentry.encode.prepare import prepare
from latentry.encode.recipe import Recipe
from latentry.processors.tiny import TinyProcessor


def one_at_a_time(paths: list[Path], output: Path, max_pixels: int) -> float:
    """Images per second of the usual script."""
    tiny = TinyProcessor("embedded", torch.device("cpu"), torch.float32)
    calculator = MultiTierBucketCalculator(64, max_pixels)
    started = time.perf_counter()
    for path in paths:
        image = Image.open(path).convert("RGB")
        width, height = calculator.get_bucket_for_image(*image.size)["resolution"]
        scale = max(width / image.width, height / image.height)
        scaled = image.resize(
            (round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS
        )
        left, top = (scaled.width - width) // 2, (scaled.height - height) // 2
        pixels = np.array(scaled.crop((left, top, left + width, top + height)))
        latent = tiny.encode_pixels(torch.from_numpy(pixels).permute(2, 0, 1)[None], None)[0]
        text = tiny.encode_texts([path.stem])
        torch.save({"latent": latent, **text, "image_path": str(path)}, output / f"{path.stem}.pt")
    return len(paths) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=120, help="images to encode (default 120)")
    parser.add_argument("--files", type=int, default=100_000, help="files to plan (default 100000)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(f"{os.cpu_count()} cores, torch {torch.__version__}")
        pictures = work / "pictures"
        pictures.mkdir()
        write_pictures(pictures, options.pictures)
        for preset in ("256p", "512p"):
            max_pixels = MultiTierBucketCalculator.RESOLUTION_PRESETS[preset]
            (plain := work / f"plain_{preset}").mkdir()
            usual = one_at_a_time(sorted(pictures.iterdir())[: options.pictures // 3], plain, max_pixels)
            started = time.perf_counter()
            prepare(
                Recipe(max_pixels=max_pixels), image_dir=pictures, output_dir=work / preset, devices="cpu"
            )
            ours = options.pictures / (time.perf_counter() - started)
            print(
                f"{preset}: {ours:.1f} images/s, one at a time {usual:.1f}: {ours / usual:.1f}x", flush=True
            )
        if options.files:
            many = work / "many"
            many.mkdir()
            write_pictures(many, options.files)
            started = time.perf_counter()
            prepare(Recipe(), image_dir=many, output_dir=work / "planned", devices="cpu", dry_run=True)
            seconds = time.perf_counter() - started
            print(
                f"planning {options.files:,d} files: {seconds:.1f} s, {options.files / seconds:,.0f} files/s"
            )
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
