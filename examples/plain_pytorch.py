"""Train with PyTorch's own DataLoader, and resume from a state file.

python examples/plain_pytorch.py CACHE [--state state.pt] [--epochs 2] [--stop_after STEPS]

Its worker processes prefetch, so the script counts the batches that it has received. The loader that
``latentry.build_text_to_image_multiresolution_dataloader`` returns counts by itself, and is faster.
"""

import argparse
import os

import torch
from torch.utils.data import DataLoader

import latentry


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", help="folder of a finished image cache")
    parser.add_argument("--state", default="state.pt", help="file to save to and to resume from")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stop_after", type=int, help="stop after this many steps, to try resuming")
    args = parser.parse_args()

    dataset = latentry.TextToImageDataset(args.cache)
    sampler = latentry.SequentialBucketSampler(dataset, base_batch_size=2, drop_last=False)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate_items, num_workers=2)
    channels = dataset[0]["latent"].shape[0]
    model = torch.nn.Conv2d(channels, channels, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    received = steps = 0
    if os.path.exists(args.state):
        state = torch.load(args.state)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
        received = state["sampler"]["batches_yielded"]

    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            latents = batch["image_latents"].float()
            noise = torch.randn_like(latents)
            loss = torch.nn.functional.mse_loss(model(latents + noise), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch}, batch {received}: {', '.join(batch['metadata']['prompts'])}", flush=True)
            received += 1
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "sampler": sampler.state_dict(batches_received=received)}, args.state)
            steps += 1
            if steps == args.stop_after:
                return
        received = 0


if __name__ == "__main__":
    main()
