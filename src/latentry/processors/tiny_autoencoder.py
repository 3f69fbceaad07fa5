"""The embedded autoencoder: 8x downscaling, 16 channels, 1.7 million weights.

With it, everything can be tried and tested without downloads or a GPU. It folds pixels into channels first, and works
at a quarter and an eighth of the resolution. It has no normalisation layer, so a latent depends on its neighbourhood
only, not on the rest of the image. ``training/train_tiny.py`` trained the weights.
"""

from __future__ import annotations

import torch
from torch import nn

LATENT_CHANNELS = 16
DOWNSCALE = 8


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.second(nn.functional.silu(self.first(x)))
        return out


class TinyAutoencoder(nn.Module):
    """``encode`` turns pixels [B,3,H,W] in -1 … 1 into latents [B,16,H/8,W/8] of about unit variance; ``decode`` inverts it."""

    latent_mean: torch.Tensor
    latent_std: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(4),
            nn.Conv2d(48, 48, 3, padding=1),
            _Residual(48),
            nn.Conv2d(48, 112, 3, stride=2, padding=1),
            _Residual(112),
            _Residual(112),
            nn.Conv2d(112, LATENT_CHANNELS, 3, padding=1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(LATENT_CHANNELS, 128, 3, padding=1),
            _Residual(128),
            _Residual(128),
            _Residual(128),
            nn.Conv2d(128, 4 * 64, 1),
            nn.PixelShuffle(2),
            _Residual(64),
            _Residual(64),
            nn.Conv2d(64, 48, 3, padding=1),
            nn.PixelShuffle(4),
        )
        self.register_buffer("latent_mean", torch.zeros(1, LATENT_CHANNELS, 1, 1))
        self.register_buffer("latent_std", torch.ones(1, LATENT_CHANNELS, 1, 1))

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        latents: torch.Tensor = self.encoder(pixels)
        return (latents - self.latent_mean) / self.latent_std

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        pixels: torch.Tensor = self.decoder(latents * self.latent_std + self.latent_mean)
        return pixels
