"""Wan 2.1: its causal video VAE and its UMT5, as its own pipeline uses them.

UMT5 is masked, so nothing depends on the padding: embeddings are cut to the caption's length and padded
with zeros. The latents are normalised with the VAE's own per-channel mean and deviation.
"""

from __future__ import annotations

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
from latentry.processors.fused.t5 import T5Encoder
from latentry.processors.fused.wan_vae import WanEncoder
from latentry.types import ProcessorInfo

TEXT_LENGTH = 226
_LENGTH_STEP = 32
_BYTES_PER_PIXEL = 130  # of all frames, in 16 bits; 4 GB for 81 frames of 832x480 on an H200
_COMPONENTS = ("vae", "text_encoder", "tokenizer")


class WanProcessor:
    info = ProcessorInfo(
        name="wan",
        media=("video",),
        model="Wan 2.1",
        model_type="wan",
        model_version="wan2.1",
        default_model_name="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        spatial_factor=8,
        temporal_factor=4,
        quantum=16,
        version=2,
    )

    def __init__(self, model_name: str, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._vae: Any
        self._umt5: Any
        self._vae, self._umt5, self._tokenizer = self._load(model_name)
        # Checkpoints have the embedding once, as shared.weight; some releases of transformers 5 leave the
        # encoder's own copy of it empty, and every text would be the same.
        self._umt5.encoder.embed_tokens.weight = self._umt5.shared.weight
        for module in (self._vae, self._umt5):
            module.to(device).eval().requires_grad_(False)
        shape = (1, self._vae.config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(self._vae.config.latents_mean).view(shape).to(device, dtype)
        self._inverse_std = 1.0 / torch.tensor(self._vae.config.latents_std).view(shape).to(device, dtype)
        self._encoder = VaeEncoder(self._vae, _BYTES_PER_PIXEL)
        self.bytes_needed = self._encoder.bytes_needed
        self._gpu_umt5: T5Encoder | None = None
        if device.type == "cuda":
            self.use_fused_encoder()

    def _load(self, model_name: str) -> tuple[Any, ...]:
        """The VAE, the text encoder and its tokenizer."""
        # Without ftfy the pipeline cleans prompts less, in silence, and embeds other text.
        require_packages("diffusers", "transformers", "sentencepiece", "ftfy")
        from diffusers import AutoencoderKLWan
        from transformers import AutoTokenizer, UMT5EncoderModel

        folder, dtype = model_folder(model_name, _COMPONENTS), self._dtype
        with loading(folder):
            return (
                AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=dtype),
                UMT5EncoderModel.from_pretrained(folder, subfolder="text_encoder", dtype=dtype),
                AutoTokenizer.from_pretrained(folder, subfolder="tokenizer"),
            )

    def use_fused_encoder(self) -> None:
        """Encode by the quicker ways in ``gpu``: the same numbers, up to rounding."""
        self._encoder.use_fused_encoder(WanEncoder)
        if T5Encoder.supports(self._umt5):
            self._gpu_umt5 = T5Encoder(self._umt5)

    @classmethod
    def weights_identity(cls, model_name: str) -> str:
        return folder_identity(model_folder(model_name, _COMPONENTS), _COMPONENTS)

    @torch.inference_mode()
    def encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        found = self._encoder.posterior(scaled_pixels(pixels, self._device, self._dtype))
        latents = found.mode() if seeds is None else draw(found, seeds)
        stored: torch.Tensor = ((latents - self._mean) * self._inverse_std).to(torch.float16)
        return stored

    @torch.inference_mode()
    def encode_texts(self, captions: list[str]) -> Columns:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        cleaned = [prompt_clean(caption) for caption in captions]
        ids, mask = padded_tokens(self._tokenizer, cleaned, TEXT_LENGTH)
        encode = self._encode_whole if self._gpu_umt5 is None else self._encode_by_length
        hidden = encode(ids, mask).masked_fill(to_device(mask, self._device)[:, :, None] == 0, 0)
        return {"text_embeddings": hidden.to(torch.bfloat16)}

    def _encode_whole(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._umt5(ids.to(self._device), mask.to(self._device)).last_hidden_state
        return hidden

    def _encode_by_length(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Captions of like length together, without the padding that would be masked anyway."""
        assert self._gpu_umt5 is not None
        lengths = (mask.sum(dim=1) + _LENGTH_STEP - 1) // _LENGTH_STEP * _LENGTH_STEP
        lengths = lengths.clamp(max=ids.shape[1])
        hidden = torch.zeros(*ids.shape, self._umt5.config.d_model, dtype=self._dtype, device=self._device)
        for length in sorted(set(lengths.tolist())):
            rows = (lengths == length).nonzero().flatten()
            part = (to_device(ids[rows, :length], self._device), to_device(mask[rows, :length], self._device))
            hidden[:, :length].index_copy_(0, to_device(rows, self._device), self._gpu_umt5(*part))
        return hidden

    def media_fields(self, pixels: torch.Tensor) -> Columns:
        return {}

    @torch.inference_mode()
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        latents = latents.to(self._device, self._dtype) / self._inverse_std + self._mean
        return unscaled_pixels(self._vae.decode(latents, return_dict=False)[0])

    def enable_tiling(self) -> bool:
        return tile(self._vae)
