"""What people write to encode a folder: one sample after the other, with the model's own diffusers modules."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image


@torch.inference_mode()
def one_at_a_time(
    processor: Any, folder: Path, output: Path, size: tuple[int, int], num_frames: int, count: int
) -> float:
    """Seconds per sample, the first one left out. The processor has the model's own modules, on a GPU."""
    if num_frames > 1:
        processor._vae.enable_tiling()
    paths = sorted(p for p in folder.iterdir() if p.suffix != ".txt")
    started = 0.0
    for i, path in enumerate([paths[0], *paths[:count]]):
        if i == 1:
            torch.cuda.synchronize()
            started = time.perf_counter()
        pixels = read_simply(path, size, num_frames)
        scaled = torch.from_numpy(pixels).to("cuda", torch.bfloat16) / 127.5 - 1
        latents = processor._vae.encode(scaled[None]).latent_dist.mode().half().cpu()
        text = processor.encode_texts([path.with_suffix(".txt").read_text()])
        data = {"latent": latents[0], **{k: v.cpu() for k, v in text.items()}, "image_path": str(path)}
        torch.save(data, output / f"{i}.pt")
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def read_simply(path: Path, size: tuple[int, int], num_frames: int) -> np.ndarray:
    width, height = size
    if num_frames == 1:
        image = Image.open(path).convert("RGB").resize((width * 4 // 3, height), Image.Resampling.LANCZOS)
        left = (image.width - width) // 2
        return np.array(image.crop((left, 0, left + width, height))).transpose(2, 0, 1).copy()
    import av

    with av.open(str(path)) as container:
        frames = [
            np.array(frame.to_image().resize((width, height), Image.Resampling.LANCZOS))
            for _, frame in zip(range(num_frames), container.decode(video=0), strict=False)
        ]
    return np.stack(frames).transpose(3, 0, 1, 2).copy()
