"""FLUX.1: its VAE, its CLIP and its T5, as its own pipeline uses them.

T5 runs without an attention mask over 512 padded tokens, so every position depends on the padding and
nothing may be trimmed. CLIP gives the pooled embedding; its hidden states are kept for trainers that
want them, and so are both token sequences.
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

T5_LENGTH = 512
CLIP_LENGTH = 77
_COMPONENTS = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


class FluxProcessor:
    info = ProcessorInfo(
        name="flux",
        media=("image",),
        model="FLUX.1",
        model_type="flux",
        default_model_name="black-forest-labs/FLUX.1-dev",
        spatial_factor=8,
    )

    def __init__(self, model_name: str, device: torch.device, dtype: torch.dtype) -> None:
        require_packages("diffusers", "transformers", "sentencepiece")
        from diffusers import AutoencoderKL
        from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

        folder = model_folder(model_name, _COMPONENTS)
        self._device, self._dtype = device, dtype
        with loading(folder):
            self._vae: Any = AutoencoderKL.from_pretrained(folder, subfolder="vae", torch_dtype=dtype)
            self._clip: Any = CLIPTextModel.from_pretrained(folder, subfolder="text_encoder", dtype=dtype)
            self._t5: Any = T5EncoderModel.from_pretrained(folder, subfolder="text_encoder_2", dtype=dtype)
            self._clip_tokens: Any = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
            self._t5_tokens: Any = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer_2")
        self._shift = self._vae.config.shift_factor or 0.0
        for module in (self._vae, self._clip, self._t5):
            module.to(device).eval().requires_grad_(False)

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
        posterior = self._vae.encode(scaled).latent_dist
        latents = posterior.mode() if seeds is None else draw(posterior, seeds)
        latents = (latents - self._shift) * self._vae.config.scaling_factor
        stored: torch.Tensor = latents.to(torch.float16)
        return stored

    @torch.inference_mode()
    def encode_texts(self, captions: list[str]) -> list[Fields]:
        clip_tokens = self._tokenize(self._clip_tokens, captions, CLIP_LENGTH)
        t5_tokens = self._tokenize(self._t5_tokens, captions, T5_LENGTH)
        clip = self._clip(clip_tokens.to(self._device), output_hidden_states=False)
        prompt_embeds = self._t5(t5_tokens.to(self._device), output_hidden_states=False)[0]
        columns = {
            "clip_tokens": clip_tokens,
            "clip_hidden": clip.last_hidden_state.to(torch.bfloat16).cpu(),
            "pooled_prompt_embeds": clip.pooler_output.to(torch.bfloat16).cpu(),
            "t5_tokens": t5_tokens,
            "prompt_embeds": prompt_embeds.to(torch.bfloat16).cpu(),
        }
        return [{key: column[i : i + 1] for key, column in columns.items()} for i in range(len(captions))]

    @staticmethod
    def _tokenize(tokenizer: Any, captions: list[str], length: int) -> torch.Tensor:
        ids: torch.Tensor = tokenizer(
            captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        return ids

    @torch.inference_mode()
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        latents = latents.to(self._device, self._dtype)
        latents = latents / self._vae.config.scaling_factor + self._shift
        return unscaled_pixels(self._vae.decode(latents, return_dict=False)[0])

    def media_fields(self, pixels: torch.Tensor) -> list[Fields]:
        return [{} for _ in pixels]

    def enable_tiling(self) -> bool:
        return tile(self._vae)
