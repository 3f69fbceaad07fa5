"""A diffusers VAE: pixels to latents, by its own modules or by a fused encoder."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from latentry.processors.fused.cuda_graphs import GraphedFunction
from latentry.processors.fused.self_check import checked_encoder
from latentry.processors.tiles import encode_tiles, largest_tiles

logger = logging.getLogger(__name__)


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
        spatial_factor: Pixels per latent position.
        one_by_one: Whether its own modules take only one sample at a time.
    """

    def __init__(
        self, vae: Any, bytes_per_pixel: int, spatial_factor: int, *, one_by_one: bool = False
    ) -> None:
        self._vae = vae
        self._spatial_factor = spatial_factor
        self._one_by_one = one_by_one
        self._bytes_per_pixel = bytes_per_pixel
        self._memory_bytes = math.inf
        self._fused: Any = None
        self._graphed: GraphedFunction | None = None
        self._tiles_announced = False

    def use_fused_encoder(self, family: Any) -> None:
        """Encode with a fused encoder from now on, if it supports the VAE and passes its self check."""
        self._fused = checked_encoder(family, self._vae)
        if self._fused is not None:
            self._graphed = GraphedFunction(self._fused)

    def use_memory(self, num_bytes: float, num_graphs: int) -> None:
        """Keep within this much working memory from now on.

        Args:
            num_bytes: The working memory.
            num_graphs: How many CUDA graphs may be kept.
        """
        if num_bytes != self._memory_bytes:
            self.release_graphs()
        self._memory_bytes = num_bytes
        if self._graphed is not None:
            self._graphed.max_graphs = num_graphs
            self._fused.use_memory(num_bytes)

    def release_graphs(self) -> None:
        """Free the memory of CUDA graphs. They are captured again when they are needed."""
        if self._graphed is not None:
            self._graphed.release()

    def stop_graphs(self) -> None:
        """Encode without CUDA graphs from now on."""
        if self._graphed is not None:
            self._graphed.stop()

    def max_batch_size(self, shape: Sequence[int], most: int, memory_bytes: float | None = None) -> int:
        """How many samples can be encoded together untiled: all, a power of two, or 0 if not even one fits.

        Args:
            shape: The shape of one sample, [3,H,W] or [3,T,H,W].
            most: More than this are not asked for.
            memory_bytes: The working memory; None is what ``use_memory`` has set.
        """
        memory_bytes = self._memory_bytes if memory_bytes is None else memory_bytes
        size = most
        while size and self._bytes_needed((size, *shape)) > memory_bytes:
            size = (1 << (size.bit_length() - 1)) // (1 if size & (size - 1) else 2)
        return size

    def latents(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        """Latents of pixels in -1 … 1: the posterior's mode, or a draw from it for each seed."""
        posterior = self._posterior(pixels)
        found: torch.Tensor = posterior.mode() if seeds is None else _draw(posterior, seeds)
        return found

    def _posterior(self, pixels: torch.Tensor) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        if self.max_batch_size(pixels.shape[1:], 1) == 0:
            return DiagonalGaussianDistribution(self._moments_from_tiles(pixels))
        return DiagonalGaussianDistribution(self._moments(pixels))

    def _moments(self, pixels: torch.Tensor) -> torch.Tensor:
        if self._graphed is not None:
            return self._graphed(pixels)
        parts = pixels.split(1) if self._one_by_one else [pixels]  # type: ignore[no-untyped-call]
        return torch.cat([self._vae.encode(part).latent_dist.parameters for part in parts])

    def _moments_from_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        *before, height, width = pixels.shape[1:]
        # The whole sample is on the device too, as bytes and in the dtype of the model.
        left = self._memory_bytes - (1 + pixels.element_size()) * pixels[0].numel()

        def fits(tile_height: int, tile_width: int) -> bool:
            return self._bytes_needed((1, *before, tile_height, tile_width)) <= left

        tiles = largest_tiles(height, width, 2 * self._spatial_factor, fits)
        if not self._tiles_announced:
            self._tiles_announced = True
            logger.warning(
                "%s does not fit into the device's memory as a whole: it is encoded in tiles of %dx%d, which is slower and "
                "changes the latents slightly; more --device_memory or a smaller resolution avoids that",
                "x".join(str(side) for side in pixels.shape[2:]),
                tiles.height,
                tiles.width,
            )
        samples = pixels.split(1)  # type: ignore[no-untyped-call]
        tiled = [encode_tiles(self._moments, sample, tiles, self._spatial_factor) for sample in samples]
        return torch.cat(tiled).to(pixels.dtype)

    def _bytes_needed(self, shape: Sequence[int]) -> int:
        """The least device memory for encoding pixels of this shape untiled."""
        if self._fused is not None:
            needed: int = self._fused.bytes_needed(shape)
            return needed
        batch_size = 1 if self._one_by_one else shape[0]
        num_pixels = batch_size * math.prod(shape[2:])
        return int(self._bytes_per_pixel * num_pixels * self._vae.dtype.itemsize // 2)


def _draw(posterior: Any, seeds: list[int]) -> torch.Tensor:
    """One draw per sample, each from its own generator, so that neither the batch nor the order matters."""
    shape = posterior.mean.shape[1:]
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    drawn: torch.Tensor = posterior.mean + posterior.std * torch.stack(noise).to(posterior.mean)
    return drawn
