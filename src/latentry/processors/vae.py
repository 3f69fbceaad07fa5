"""A diffusers VAE: pixels to latents, by its own modules or by a fused encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from latentry.processors.fused.cuda_graphs import GraphedFunction
from latentry.processors.fused.self_check import checked_encoder


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for the work that is queued there, which needs pinned memory."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def scaled_pixels(pixels: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """uint8 to -1 … 1, by the same steps as diffusers' image processors."""
    # One copy, then in place: a clip takes half a gigabyte.
    scaled = to_device(pixels, device).to(torch.float32, copy=True)
    return scaled.div_(255).mul_(2).sub_(1).to(dtype)


def unscaled_pixels(pixels: torch.Tensor) -> torch.Tensor:
    """-1 … 1 to uint8."""
    return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


class VaeEncoder:
    """Encodes with a VAE's own modules, or with a fused encoder after ``use_fused_encoder``.

    Args:
        vae: A diffusers VAE.
        bytes_per_pixel: Device memory that its own modules need for each pixel of each frame, in 16 bits.
        one_by_one: Whether its own modules take only one sample at a time.
    """

    def __init__(self, vae: Any, bytes_per_pixel: int, *, one_by_one: bool = False) -> None:
        self._vae = vae
        self._one_by_one = one_by_one
        self._bytes_per_pixel = bytes_per_pixel
        self._fused: GraphedFunction | None = None
        self._fused_bytes_needed: Callable[[torch.Tensor], int] | None = None

    def use_fused_encoder(self, family: Any) -> None:
        """Encode with a fused encoder from now on, if it supports the VAE and passes its self check."""
        encoder = checked_encoder(family, self._vae)
        if encoder is not None:
            self._fused = GraphedFunction(encoder)
            self._fused_bytes_needed = getattr(encoder, "bytes_needed", None)

    def latents(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        """Latents of pixels in -1 … 1: the posterior's mode, or a draw from it for each seed."""
        posterior = self._posterior(pixels)
        found: torch.Tensor = posterior.mode() if seeds is None else _draw(posterior, seeds)
        return found

    def _posterior(self, pixels: torch.Tensor) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        if self._fused is not None and not self._vae.use_tiling:
            return DiagonalGaussianDistribution(self._fused(pixels))
        if not self._one_by_one or len(pixels) == 1:
            return self._vae.encode(pixels).latent_dist
        moments = [self._vae.encode(sample[None]).latent_dist.parameters for sample in pixels]
        return DiagonalGaussianDistribution(torch.cat(moments))

    def bytes_needed(self, pixels: torch.Tensor) -> int:
        """Estimate the device memory for encoding these pixels untiled."""
        if self._fused_bytes_needed is not None:
            return self._fused_bytes_needed(pixels)
        needed: int = self._bytes_per_pixel * pixels.numel() // 3 * self._vae.dtype.itemsize // 2
        return needed

    def enable_tiling(self) -> bool:
        """Encode in tiles from now on. Return False if the VAE does so already."""
        if self._vae.use_tiling:
            return False
        self._vae.enable_tiling()
        return True


def _draw(posterior: Any, seeds: list[int]) -> torch.Tensor:
    """One draw per sample, each from its own generator, so that neither the batch nor the order matters."""
    shape = posterior.mean.shape[1:]
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    drawn: torch.Tensor = posterior.mean + posterior.std * torch.stack(noise).to(posterior.mean)
    return drawn
