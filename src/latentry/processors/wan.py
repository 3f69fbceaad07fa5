"""Wan 2.1: its causal video VAE and its UMT5, as its own pipeline uses them.

UMT5 is masked, so nothing depends on the padding: embeddings are cut to the caption's length and padded
with zeros. The latents are normalised with the VAE's own per-channel mean and deviation.
"""

from __future__ import annotations

from typing import Any

import torch

from latentry.processors import Fields
from latentry.processors.diffusers_model import (
    draw,
    folder_identity,
    loading,
    model_folder,
    require_packages,
    scaled_pixels,
    tile,
    unscaled_pixels,
)
from latentry.records import ProcessorInfo

TEXT_LENGTH = 226
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
        encode_bytes_per_pixel=130,  # 4 GB for 81 frames of 832x480 on an H200
    )

    def __init__(self, model_name: str, device: torch.device, dtype: torch.dtype) -> None:
        # Without ftfy the pipeline cleans prompts less, in silence, and embeds other text.
        require_packages("diffusers", "transformers", "sentencepiece", "ftfy")
        from diffusers import AutoencoderKLWan
        from transformers import AutoTokenizer, UMT5EncoderModel

        folder = model_folder(model_name, _COMPONENTS)
        self._device, self._dtype = device, dtype
        with loading(folder):
            self._vae: Any = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=dtype)
            self._umt5: Any = UMT5EncoderModel.from_pretrained(folder, subfolder="text_encoder", dtype=dtype)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
        # Checkpoints have the embedding once, as shared.weight; some releases of transformers 5 leave the
        # encoder's own copy of it empty, and every text would be the same.
        self._umt5.encoder.embed_tokens.weight = self._umt5.shared.weight
        for module in (self._vae, self._umt5):
            module.to(device).eval().requires_grad_(False)
        shape = (1, self._vae.config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(self._vae.config.latents_mean).view(shape).to(device, dtype)
        self._inverse_std = 1.0 / torch.tensor(self._vae.config.latents_std).view(shape).to(device, dtype)

    @classmethod
    def weights_identity(cls, model_name: str) -> str:
        return folder_identity(model_folder(model_name, _COMPONENTS), _COMPONENTS)

    @torch.inference_mode()
    def encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        posterior = self._vae.encode(scaled_pixels(pixels, self._device, self._dtype)).latent_dist
        latents = posterior.mode() if seeds is None else draw(posterior, seeds)
        stored: torch.Tensor = ((latents - self._mean) * self._inverse_std).to(torch.float16)
        return stored

    @torch.inference_mode()
    def encode_texts(self, captions: list[str]) -> list[Fields]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        tokens = self._tokenizer(
            [prompt_clean(caption) for caption in captions],
            padding="max_length",
            max_length=TEXT_LENGTH,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = tokens.attention_mask
        hidden = self._umt5(tokens.input_ids.to(self._device), mask.to(self._device)).last_hidden_state
        hidden = hidden.cpu() * mask[:, :, None].to(hidden.dtype)
        return [{"text_embeddings": hidden[i : i + 1].to(torch.bfloat16)} for i in range(len(captions))]

    def media_fields(self, pixels: torch.Tensor) -> list[Fields]:
        return [{} for _ in pixels]

    @torch.inference_mode()
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        latents = latents.to(self._device, self._dtype) / self._inverse_std + self._mean
        return unscaled_pixels(self._vae.decode(latents, return_dict=False)[0])

    def enable_tiling(self) -> bool:
        return tile(self._vae)
