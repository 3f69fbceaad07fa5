"""The embedded processor: its weights are part of the package.

It is for trying out and for tests, not for real training. Decoded images are recognisable and a little soft.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import resources

import torch
from safetensors.torch import load

from latentry.errors import ConfigError
from latentry.processors.base import Processor, StackedFields
from latentry.processors.tiny_autoencoder import DOWNSCALE, TinyAutoencoder
from latentry.processors.tiny_text import TinyTextEncoder
from latentry.types import ProcessorInfo

_ASSET = resources.files("latentry.processors") / "assets" / "tiny_autoencoder.safetensors"
_ENCODER_IDENTITY = "bdb82c7b6aaf486540227fdeb4e1bee2"
"""Identifies the encoder in caches: the digest of the first file that contained it. The decoder has no effect on latents,
so caches stay valid when only the decoder is trained again. A new encoder needs a new value."""


class TinyProcessor(Processor):
    info = ProcessorInfo(
        name="tiny",
        media=("image", "video"),
        model="embedded autoencoder, for trying out and tests",
        model_type="tiny",
        default_model_name="embedded",
        spatial_factor=DOWNSCALE,
        patch=1,
        version=2,
    )

    def __init__(
        self,
        model_name: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        text_dtype: str = "auto",
        device_memory: float = math.inf,
    ) -> None:
        _require_embedded(model_name)
        self._device, self._dtype = device, dtype
        autoencoder = TinyAutoencoder()
        autoencoder.load_state_dict(load(_ASSET.read_bytes()))
        # Channels last is a quarter faster on a CPU.
        self._autoencoder = autoencoder.to(device, dtype).eval()
        for parameter in autoencoder.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self._text = TinyTextEncoder()

    @classmethod
    def weights_identity(cls, model_name: str, *, download: bool = True) -> str:
        _require_embedded(model_name)
        return _ENCODER_IDENTITY + TinyTextEncoder.identity()

    @torch.inference_mode()
    def encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        if seeds is not None:
            raise ConfigError("the tiny processor has no posterior to sample from; leave out --stochastic")
        return _frame_by_frame(self._encode_images, pixels)

    def _encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        scaled = pixels.to(self._device).to(self._dtype, memory_format=torch.channels_last) / 127.5 - 1
        return self._autoencoder.encode(scaled).to(torch.float16).contiguous()

    def encode_texts(self, captions: list[str]) -> StackedFields:
        encoded = [self._text.encode(caption) for caption in captions]
        return {
            "prompt_embeds": torch.stack([vectors for vectors, _ in encoded]).bfloat16(),
            "pooled_prompt_embeds": torch.stack([mean for _, mean in encoded]).bfloat16(),
        }

    def media_fields(self, pixels: torch.Tensor) -> StackedFields:
        return {}

    @torch.inference_mode()
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        return _frame_by_frame(self._decode_images, latents)

    def _decode_images(self, latents: torch.Tensor) -> torch.Tensor:
        pixels = self._autoencoder.decode(latents.to(self._device, self._dtype))
        return ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _frame_by_frame(encode: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """Apply a function of [B,C,H,W] to a batch of that shape, or to each frame of [B,C,T,H,W]."""
    if batch.ndim == 4:
        return encode(batch)
    return torch.stack([encode(frame) for frame in batch.unbind(dim=2)], dim=2)


def _require_embedded(model_name: str) -> None:
    if model_name != TinyProcessor.info.default_model_name:
        raise ConfigError(f"the tiny processor has built-in weights; leave out --model_name {model_name!r}")
