"""Originals beside what their latents decode to: ``python examples/contact_sheet.py IMAGES SHEET.png [CLIPS]``."""

import json
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from latentry.cache.read.files import load_cache_file
from latentry.media.images import decode_image, fit_to_bucket
from latentry.processors import processor_class
from latentry.serve.dataset import TextToImageDataset, TextToVideoDataset

TILE, GAP, TEXT, COLUMNS = 220, 8, 16, 3


def tile(pixels: torch.Tensor) -> Image.Image:
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    picture.thumbnail((TILE, TILE))
    framed = Image.new("RGB", (TILE, TILE), "white")
    framed.paste(picture, ((TILE - picture.width) // 2, (TILE - picture.height) // 2))
    return framed


def processor_of(cache: Path):
    metadata = json.loads((cache / "metadata.json").read_text())
    return processor_class(metadata["processor"])(metadata["model_name"], torch.device("cpu"), torch.float32)


def pictures(cache: Path):
    """Label, original and restored picture of every sample."""
    processor = processor_of(cache)
    for item in TextToImageDataset(cache):
        bucket = tuple(item["crop_resolution"].tolist())
        original, _ = fit_to_bucket(decode_image(Path(item["image_path"]).read_bytes()), bucket)
        yield (
            f"{bucket[0]}x{bucket[1]}  {item['prompt']}",
            original,
            processor.decode_latents(item["latent"][None])[0],
        )


def clips(cache: Path):
    """The same for the first frame of every clip, and for its last as it was restored."""
    processor = processor_of(cache)
    dataset = TextToVideoDataset(cache, model_type=processor.info.model_type)
    for number, item in enumerate(dataset):
        data = load_cache_file(dataset.cache_dir, dataset.index.relative_file(number))
        restored = processor.decode_latents(item["video_latents"])[0]
        first = data["first_frame"].permute(2, 0, 1)
        yield f"first frame  {data['prompt']}", first, restored[:, 0]
        yield f"frames 1 and {restored.shape[1]}, both decoded", restored[:, 0], restored[:, -1]


def main(sheet_path: Path, image_cache: Path, clip_cache: Path | None) -> None:
    entries = [*pictures(image_cache), *(clips(clip_cache) if clip_cache else [])]
    width, height = 2 * TILE + 3 * GAP, TILE + TEXT + 2 * GAP
    sheet = Image.new("RGB", (COLUMNS * width, -(-len(entries) // COLUMNS) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (label, original, restored) in enumerate(entries):
        left, top = (number % COLUMNS) * width + GAP, (number // COLUMNS) * height + GAP
        sheet.paste(tile(original), (left, top))
        sheet.paste(tile(restored), (left + TILE + GAP, top))
        draw.text((left, top + TILE), label[:68], fill="black")
    sheet.save(sheet_path)
    print(f"{sheet_path}: {len(entries)} pairs, the original on the left, its latent decoded on the right")


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[1]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
