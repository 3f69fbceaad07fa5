"""FLUX.1: its VAE, its CLIP and its T5, as its own pipeline uses them.

T5 runs without an attention mask over 512 padded tokens, so every position depends on the padding and
nothing may be trimmed. CLIP gives the pooled embedding; its hidden states are kept for trainers that
want them, and so are both token sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from latentry.processors import Columns
from latentry.processors.diffusers_model import (
    VaeEncoder,
    draw,
    folder_identity,
    loading,
    model_folder,
    padded_tokens,
    require_packages,
    scaled_pixels,
    tile,
    to_device,
    unscaled_pixels,
)
from latentry.processors.fused.clip import ClipEncoder, states_of
from latentry.processors.fused.cuda_graphs import CudaGraphed
from latentry.processors.fused.image_vae import ImageEncoder
from latentry.processors.fused.t5 import T5Encoder
from latentry.types import ProcessorInfo

T5_LENGTH = 512
CLIP_LENGTH = 77
_BYTES_PER_PIXEL = 1100  # in 16 bits; 1.1 GB for 1024x1024 on an H200
_COMPONENTS = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


class FluxProcessor:
    info = ProcessorInfo(
        name="flux",
        media=("image",),
        model="FLUX.1",
        model_type="flux",
        default_model_name="black-forest-labs/FLUX.1-dev",
        spatial_factor=8,
        version=2,
    )

    def __init__(self, model_name: str, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._vae: Any
        self._clip: Any
        self._t5: Any
        self._vae, self._clip, self._t5, self._clip_tokens, self._t5_tokens = self._load(model_name)
        self._shift = self._vae.config.shift_factor or 0.0
        for module in (self._vae, self._clip, self._t5):
            module.to(device).eval().requires_grad_(False)
        self._encoder = VaeEncoder(self._vae, _BYTES_PER_PIXEL)
        self.bytes_needed = self._encoder.bytes_needed
        self._clip_states: Callable[[torch.Tensor], torch.Tensor] = partial(states_of, self._clip)
        self._gpu_t5: CudaGraphed | None = None
        if device.type == "cuda":
            self.use_fused_encoder()

    def _load(self, model_name: str) -> tuple[Any, ...]:
        """The VAE, the two text encoders and their tokenizers."""
        require_packages("diffusers", "transformers", "sentencepiece")
        from diffusers import AutoencoderKL
        from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

        folder, dtype = model_folder(model_name, _COMPONENTS), self._dtype
        with loading(folder):
            return (
                AutoencoderKL.from_pretrained(folder, subfolder="vae", torch_dtype=dtype),
                CLIPTextModel.from_pretrained(folder, subfolder="text_encoder", dtype=dtype),
                T5EncoderModel.from_pretrained(folder, subfolder="text_encoder_2", dtype=dtype),
                AutoTokenizer.from_pretrained(folder, subfolder="tokenizer"),
                AutoTokenizer.from_pretrained(folder, subfolder="tokenizer_2"),
            )

    def use_fused_encoder(self) -> None:
        """Encode by the quicker ways in ``gpu``: the same numbers, up to rounding."""
        self._encoder.use_fused_encoder(ImageEncoder)
        if ClipEncoder.supports(self._clip):
            self._clip_states = CudaGraphed(ClipEncoder(self._clip))
        if T5Encoder.supports(self._t5):
            self._gpu_t5 = CudaGraphed(T5Encoder(self._t5))

    @classmethod
    def weights_identity(cls, model_name: str) -> str:
        return folder_identity(model_folder(model_name, _COMPONENTS), _COMPONENTS)

    @torch.inference_mode()
    def encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        scaled = scaled_pixels(pixels, self._device, self._dtype)
        if (
            self._device.type == "cpu"
        ):  # the layout in which diffusers hands over a picture: same kernels, same bits
            scaled = scaled.to(memory_format=torch.channels_last)
        found = self._encoder.posterior(scaled)
        latents = found.mode() if seeds is None else draw(found, seeds)
        latents = (latents - self._shift) * self._vae.config.scaling_factor
        stored: torch.Tensor = latents.to(torch.float16)
        return stored

    @torch.inference_mode()
    def encode_texts(self, captions: list[str]) -> Columns:
        clip_tokens, _ = padded_tokens(self._clip_tokens, captions, CLIP_LENGTH)
        t5_tokens, _ = padded_tokens(self._t5_tokens, captions, T5_LENGTH)
        clip_states = self._clip_states(to_device(clip_tokens, self._device)).to(torch.bfloat16)
        if self._gpu_t5 is not None:
            prompt_embeds = self._gpu_t5(to_device(t5_tokens, self._device))
        else:
            prompt_embeds = self._t5(t5_tokens.to(self._device), output_hidden_states=False)[0]
        return {
            "clip_tokens": clip_tokens,
            "clip_hidden": clip_states[:, :-1],
            "pooled_prompt_embeds": clip_states[:, -1],
            "t5_tokens": t5_tokens,
            "prompt_embeds": prompt_embeds.to(torch.bfloat16),
        }

    @torch.inference_mode()
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        latents = latents.to(self._device, self._dtype)
        latents = latents / self._vae.config.scaling_factor + self._shift
        return unscaled_pixels(self._vae.decode(latents, return_dict=False)[0])

    def media_fields(self, pixels: torch.Tensor) -> Columns:
        return {}

    def enable_tiling(self) -> bool:
        return tile(self._vae)
