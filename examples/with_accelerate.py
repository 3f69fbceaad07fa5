"""Train with Hugging Face Accelerate, and resume from a checkpoint folder.

python examples/with_accelerate.py CACHE [--state checkpoint] [--epochs 2] [--stop_after STEPS]
accelerate launch examples/with_accelerate.py CACHE

Build the loader after the Accelerator, so that it knows its rank, and with the Accelerator's device.
``Accelerator.prepare`` leaves the loader as it is: it already serves each rank its own samples.
"""

import argparse
import os

import torch
from accelerate import Accelerator

import latentry


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", help="folder of a finished image cache")
    parser.add_argument("--state", default="checkpoint", help="folder to save to and to resume from")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stop_after", type=int, help="stop after this many batches, to try resuming")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader, sampler = latentry.build_text_to_image_multiresolution_dataloader(
        cache_dir=args.cache, batch_size=2, drop_last=False, device=accelerator.device
    )
    channels = loader.dataset[0]["latent"].shape[0]
    model = torch.nn.Conv2d(channels, channels, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if os.path.exists(args.state):
        accelerator.load_state(args.state)  # the loader's position too

    steps = 0
    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                latents = batch["image_latents"].float()
                noise = torch.randn_like(latents)
                loss = torch.nn.functional.mse_loss(model(latents + noise), noise)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            print(f"epoch {epoch}: {', '.join(batch['metadata']['prompts'])}", flush=True)
            accelerator.save_state(args.state)
            steps += 1
            if steps == args.stop_after:
                accelerator.end_training()
                return
    accelerator.end_training()


if __name__ == "__main__":
    main()
