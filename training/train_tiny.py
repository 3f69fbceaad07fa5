"""Train the autoencoder of the ``tiny`` processor on a folder of photographs. Takes a few minutes on one GPU.

    python training/train_tiny.py PHOTOS tiny_autoencoder.safetensors --held_out OTHER_PHOTOS

The training data are random crops at random scales, flipped at random, and the loss is the squared error. A little noise
on the latents makes similar latents decode to similar images. ``docs/explanation/tiny.md`` lists the photographs that the shipped
weights were trained on, and the quality on others.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from latentry.processors.tiny_autoencoder import TinyAutoencoder

CROP = 256
LATENT_NOISE = 0.02
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


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


class Crops:
    """Random crops from photographs, which stay on the device at several scales."""

    def __init__(self, photos: list[torch.Tensor], device: torch.device) -> None:
        self.levels: list[torch.Tensor] = []
        for photo in photos:
            level = photo.to(device)[None]
            while min(level.shape[-2:]) >= CROP:
                self.levels.append(level[0])
                size = [round(edge * 0.6) for edge in level.shape[-2:]]
                smaller = torch.nn.functional.interpolate(
                    level.float(), size=size, mode="bicubic", antialias=True
                )
                level = smaller.round().clamp(0, 255).to(torch.uint8)
        areas = torch.tensor([float(level.shape[-1] * level.shape[-2]) for level in self.levels])
        self.weights = areas.sqrt()

    def batch(self, size: int) -> torch.Tensor:
        crops = []
        for i in torch.multinomial(self.weights, size, replacement=True).tolist():
            level = self.levels[i]
            top = int(torch.randint(level.shape[-2] - CROP + 1, ()))
            left = int(torch.randint(level.shape[-1] - CROP + 1, ()))
            crop = level[:, top : top + CROP, left : left + CROP]
            if torch.rand(()) < 0.5:
                crop = crop.flip(2)
            if torch.rand(()) < 0.25:
                crop = crop.transpose(1, 2)
            crops.append(crop)
        return torch.stack(crops).float() / 127.5 - 1


@torch.inference_mode()
def psnr(model: TinyAutoencoder, photos: list[torch.Tensor], device: torch.device) -> list[float]:
    """PSNR of each photograph in decibels, through latents in 16-bit floats, as the cache stores them."""
    values = []
    for photo in photos:
        pixels = photo.to(device)[None].float() / 127.5 - 1
        decoded = model.decode(model.encode(pixels).half().float())
        restored = ((decoded + 1) * 127.5).round().clamp(0, 255)
        error = (restored - photo.to(device)[None].float()).square().mean().item()
        values.append(10 * math.log10(255**2 / max(error, 1e-9)))
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--held_out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--batch_size", type=int, default=48)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    crops = Crops(load_photos(options.photos), device)
    held_out = load_photos(options.held_out, side=512)
    print(f"{len(crops.levels)} training images over all scales, {len(held_out)} held out", flush=True)
    model = TinyAutoencoder().to(device)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999), use_buffers=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, betas=(0.9, 0.99))
    start_s, step = time.monotonic(), 0
    while (done := (time.monotonic() - start_s) / (60 * options.minutes)) < 1:
        rate = 1e-3 * min(1, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        pixels = crops.batch(options.batch_size)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            latents = model.encode(pixels)
            noisy = latents + LATENT_NOISE * latents.detach().std() * torch.randn_like(latents)
            decoded = model.decode(noisy)
        loss = (decoded.float() - pixels).square().mean() + 1e-5 * latents.float().square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        step += 1
        if step % 1000 == 0:
            values = psnr(average.module, held_out, device)
            print(
                f"step {step}, loss {loss.item():.5f}, held out {sum(values) / len(values):.2f} dB",
                flush=True,
            )

    model = average.module
    with torch.inference_mode():
        latents = torch.cat([model.encode(crops.batch(16)) for _ in range(40)])
        model.latent_mean.copy_(latents.mean(dim=(0, 2, 3), keepdim=True))
        model.latent_std.copy_(latents.std(dim=(0, 2, 3), keepdim=True))
    model = model.half().float()  # measure the weights as they are stored
    values = psnr(model, held_out, device)
    print(f"{step} steps; held out: mean {sum(values) / len(values):.2f} dB, worst {min(values):.2f} dB")
    save_file(
        {name: value.half().contiguous().cpu() for name, value in model.state_dict().items()}, options.output
    )


if __name__ == "__main__":
    main()
