"""Train with Lightning, and resume in the middle of an epoch from its checkpoint.

python examples/with_lightning.py CACHE [--state state.ckpt] [--epochs 2] [--stop_after STEPS]

Lightning sets the sampler's epoch, and its checkpoints hold the loader's position. On several devices, pass
``use_distributed_sampler=False``: the loader already serves each rank its own samples.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import latentry


class Model(L.LightningModule):
    def __init__(self, cache: str) -> None:
        super().__init__()
        self.cache = cache
        channels = latentry.TextToImageDataset(cache)[0]["latent"].shape[0]
        self.layer = torch.nn.Conv2d(channels, channels, 1)

    def train_dataloader(self):
        loader, _ = latentry.build_text_to_image_multiresolution_dataloader(
            cache_dir=self.cache, batch_size=2, drop_last=False
        )
        return loader

    def training_step(self, batch, batch_idx):
        print(f"epoch {self.current_epoch}: {', '.join(batch['metadata']['prompts'])}", flush=True)
        latents = batch["image_latents"].float()
        noise = torch.randn_like(latents)
        return torch.nn.functional.mse_loss(self.layer(latents + noise), noise)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", help="folder of a finished image cache")
    parser.add_argument(
        "--state", type=Path, default=Path("state.ckpt"), help="file to save to and to resume from"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--stop_after", type=int, default=-1, help="stop after this many steps, to try resuming"
    )
    args = parser.parse_args()

    saving = ModelCheckpoint(
        dirpath=args.state.parent,
        filename=args.state.stem,
        every_n_train_steps=1,
        enable_version_counter=False,
    )
    trainer = L.Trainer(
        max_epochs=args.epochs,
        max_steps=args.stop_after,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Model(args.cache), ckpt_path=args.state if args.state.exists() else None)


if __name__ == "__main__":
    main()
