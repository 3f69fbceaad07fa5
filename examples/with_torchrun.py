"""Train on several ranks with DistributedDataParallel, and resume on any number of ranks.

torchrun --nproc-per-node 2 examples/with_torchrun.py CACHE [--state state.pt] [--epochs 2] [--stop_after STEPS]

The loader asks ``torch.distributed`` for its rank, so build it after the process group. The state is the same on all
ranks: one rank saves it, all ranks load it.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    loader, sampler = latentry.build_text_to_image_multiresolution_dataloader(
        cache_dir=args.cache, batch_size=2, drop_last=False, device=device
    )
    channels = loader.dataset[0]["latent"].shape[0]
    model = DistributedDataParallel(torch.nn.Conv2d(channels, channels, 1).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    if os.path.exists(args.state):
        state = torch.load(args.state, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])

    steps = 0
    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            latents = batch["image_latents"].float()
            noise = torch.randn_like(latents)
            loss = torch.nn.functional.mse_loss(model(latents + noise), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch}: {', '.join(batch['metadata']['prompts'])}", flush=True)
            if dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "loader": loader.state_dict()}, args.state)
            steps += 1
            if steps == args.stop_after:
                break
        if steps == args.stop_after:
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
