"""Train the autoencoder of the ``tiny`` processor.

    python training/train_tiny.py PHOTOS tiny_autoencoder.safetensors --held_out OTHER_PHOTOS

This takes a few minutes on one GPU. With ``--start_from WEIGHTS``, the encoder is kept and only the decoder is trained
further, so latents do not change. With a small ``--side`` and ``--batch_size``, that
takes 20 minutes on one core.

Each batch has photographs, recoloured photographs and drawings (``pictures.py``). The loss is the squared error. Drawings
count less, because their hard edges would otherwise dominate it. A little noise on the latents makes similar latents decode
to similar images. ``docs/explanation/tiny.md`` has the command that made the shipped weights, and their quality.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from measure_tiny import load_photos, report
from pictures import Pictures
from safetensors.torch import load_file, save_file

from latentry.processors.tiny_autoencoder import TinyAutoencoder

LATENT_NOISE = 0.02
SHARE_RECOLOURED = 0.125
SHARE_DRAWN = 0.25
DRAWING_WEIGHT = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--held_out", type=Path, required=True)
    parser.add_argument("--num_steps", type=int, default=40_000)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--side", type=int, default=256, help="of the pictures in a batch")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--start_from", type=Path, help="keep this encoder and train this decoder further")
    parser.add_argument("--report_every", type=int, default=1000)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    pictures = Pictures(load_photos(options.photos), options.side, device, seed=0)
    held_out = load_photos(options.held_out, side=512)
    print(f"{pictures.num_levels} training images over all scales, {len(held_out)} held out", flush=True)
    num_drawn = round(options.batch_size * SHARE_DRAWN)
    num_recoloured = round(options.batch_size * SHARE_RECOLOURED)
    num_photos = options.batch_size - num_drawn - num_recoloured
    weights = torch.ones(options.batch_size, device=device)
    weights[-num_drawn:] = DRAWING_WEIGHT
    weights /= weights.mean()

    model = TinyAutoencoder()
    if options.start_from:
        model.load_state_dict(load_file(options.start_from))
        model.encoder.requires_grad_(False)
    model = model.to(device, memory_format=torch.channels_last)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(min(0.999, 1 - 10 / options.num_steps))
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=1e-4, betas=(0.9, 0.99), fused=True)
    num_warmup_steps = min(200, options.num_steps / 20)

    def compute_loss(pixels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            latents = model.encode(pixels)
            noisy = latents + LATENT_NOISE * latents.detach().std() * torch.randn_like(latents)
            decoded = model.decode(noisy)
        errors = (decoded.float() - pixels).square().mean(dim=(1, 2, 3))
        return (weights * errors).mean() + 1e-5 * latents.float().square().mean()

    start_s = time.monotonic()
    for step in range(1, options.num_steps + 1):
        done = (step - 1) / options.num_steps
        decay = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1, step / num_warmup_steps) * decay
        pixels = pictures.batch(num_photos, num_recoloured, num_drawn).contiguous(
            memory_format=torch.channels_last
        )
        loss = compute_loss(pixels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        average.update_parameters(model)
        if step % options.report_every == 0:
            print(f"step {step}, {time.monotonic() - start_s:.0f} s, loss {loss.item():.5f}", flush=True)

    model = average.module
    if not options.start_from:
        with torch.inference_mode():
            latents = torch.cat([model.encoder(pictures.photos(16)) for _ in range(40)])
            model.latent_mean.copy_(latents.mean(dim=(0, 2, 3), keepdim=True))
            model.latent_std.copy_(latents.std(dim=(0, 2, 3), keepdim=True))
    model = model.half().float()  # measure the weights as they are stored
    print(f"{options.num_steps} steps in {time.monotonic() - start_s:.0f} s\n{report(model, held_out)}")
    state = {name: value.half().contiguous().cpu() for name, value in model.state_dict().items()}
    save_file(state, options.output)


if __name__ == "__main__":
    main()
