"""Originals beside what their latents decode to: ``python examples/contact_sheet.py CACHE SHEET.png``."""

import json
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from latentry.datasets import TextToImageDataset
from latentry.media.images import decode_image, fit_to_bucket
from latentry.processors import processor_class

TILE, GAP, TEXT, COLUMNS = 220, 8, 16, 3


def tile(pixels: torch.Tensor) -> Image.Image:
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    picture.thumbnail((TILE, TILE))
    framed = Image.new("RGB", (TILE, TILE), "white")
    framed.paste(picture, ((TILE - picture.width) // 2, (TILE - picture.height) // 2))
    return framed


def main(cache: Path, sheet_path: Path) -> None:
    recipe = json.loads((cache / "metadata.json").read_text())
    processor = processor_class(recipe["processor"])(recipe["model_name"], torch.device("cpu"), torch.float32)
    dataset = TextToImageDataset(cache)
    width, height = 2 * TILE + 3 * GAP, TILE + TEXT + 2 * GAP
    sheet = Image.new("RGB", (COLUMNS * width, -(-len(dataset) // COLUMNS) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for number in range(len(dataset)):
        item = dataset[number]
        bucket = tuple(item["crop_resolution"].tolist())
        original, _ = fit_to_bucket(decode_image(Path(item["image_path"]).read_bytes()), bucket)
        restored = processor.decode_latents(item["latent"][None])[0]
        left, top = (number % COLUMNS) * width + GAP, (number // COLUMNS) * height + GAP
        sheet.paste(tile(original), (left, top))
        sheet.paste(tile(restored), (left + TILE + GAP, top))
        draw.text((left, top + TILE), f"{bucket[0]}x{bucket[1]}  {item['prompt'][:60]}", fill="black")
    sheet.save(sheet_path)
    print(f"{sheet_path}: {len(dataset)} pictures, the original on the left, its latent decoded on the right")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
