"""Measure the ``tiny`` autoencoder on photographs it has not seen, on flat colours and on drawings.

    python training/measure_tiny.py tiny_autoencoder.safetensors OTHER_PHOTOS

All values are PSNR in decibels, through latents in 16-bit floats, as the cache stores them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from pictures import Pictures
from PIL import Image
from safetensors.torch import load_file

from latentry.processors.tiny_autoencoder import TinyAutoencoder

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
NUM_GRID_STEPS = 9
NUM_DRAWINGS = 32
SEED = 12345
"""Not the seed of the training, so that the drawings are others."""


def load_photos(folder: Path, side: int | None = None) -> list[torch.Tensor]:
    """All photographs as uint8 [3,H,W]; with ``side``, the central square scaled to it."""
    photos = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES):
        image = Image.open(path).convert("RGB")
        if side:
            edge = min(image.size)
            left, top = (image.width - edge) // 2, (image.height - edge) // 2
            image = image.crop((left, top, left + edge, top + edge)).resize((side, side), Image.LANCZOS)
        photos.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    return photos


@torch.inference_mode()
def psnr(model: TinyAutoencoder, pixels: torch.Tensor) -> list[float]:
    """PSNR of each picture of uint8 [B,3,H,W]."""
    values = []
    for part in pixels.to(model.latent_mean.device).float().split(8):
        decoded = model.decode(model.encode(part / 127.5 - 1).half().float())
        restored = ((decoded + 1) * 127.5).round().clamp(0, 255)
        errors = (restored - part).square().mean(dim=(1, 2, 3))
        values += (10 * torch.log10(255**2 / errors.clamp_min(1e-4))).tolist()
    return values


def flat_colours() -> torch.Tensor:
    """One flat picture [3,64,64] for each colour on a grid over the RGB cube."""
    steps = torch.linspace(0, 255, NUM_GRID_STEPS).round()
    colours = torch.cartesian_prod(steps, steps, steps).to(torch.uint8)
    return colours[:, :, None, None].expand(-1, 3, 64, 64)


def report(model: TinyAutoencoder, held_out: list[torch.Tensor]) -> str:
    pictures = Pictures(held_out, 256, torch.device("cpu"), SEED)
    drawings = {
        "neon photographs": pictures.recolour(pictures.photos(NUM_DRAWINGS)),
        "gradients": pictures.gradients(NUM_DRAWINGS),
        "mosaics": torch.cat([pictures.mosaics(NUM_DRAWINGS // 8) for _ in range(8)]),
        "shapes": pictures.shapes(NUM_DRAWINGS),
        "text": pictures.text(NUM_DRAWINGS),
    }
    sets = {"photographs": torch.stack(held_out), "flat colours": flat_colours()}
    sets |= {name: ((made + 1) * 127.5).round().to(torch.uint8) for name, made in drawings.items()}
    lines = []
    for name, pixels in sets.items():
        values = psnr(model, pixels)
        lines.append(f"  {name}: mean {sum(values) / len(values):.2f} dB, worst {min(values):.2f} dB")
    return "\n".join(lines)


def main() -> None:
    weights, folder = map(Path, sys.argv[1:])
    model = TinyAutoencoder()
    model.load_state_dict(load_file(weights))
    held_out = load_photos(folder, side=512)
    print(report(model, held_out))
    names = sorted(p.name for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    for name, value in zip(names, psnr(model, torch.stack(held_out)), strict=True):
        print(f"  {name}: {value:.2f} dB")


if __name__ == "__main__":
    main()
