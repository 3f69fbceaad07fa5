"""FLUX.1: its VAE, CLIP and T5, as its own pipeline uses them.

T5 runs without an attention mask over 512 padded tokens, so every position depends on the padding and nothing is
trimmed. CLIP gives the pooled embedding. Its hidden states and both token sequences are stored too, for trainers that
use them.
"""

from __future__ import annotations

from typing import Any

import torch

from latentry.processors.base import StackedFields
from latentry.processors.diffusers_model import DiffusersProcessor
from latentry.processors.fused.clip import ClipEncoder
from latentry.processors.fused.cuda_graphs import GraphedFunction
from latentry.processors.fused.image_vae import ImageEncoder
from latentry.processors.fused.self_check import checked_encoder
from latentry.processors.fused.t5 import OWN_MODULES_FACTOR, T5Encoder, token_bytes
from latentry.processors.memory.text_encoders import TextEncoders
from latentry.processors.model_folder import loading
from latentry.processors.tokens import padded_tokens
from latentry.processors.vae import scaled_pixels, to_device, unscaled_pixels
from latentry.types import ProcessorInfo

T5_LENGTH = 512
CLIP_LENGTH = 77


class FluxProcessor(DiffusersProcessor):
    info = ProcessorInfo(
        name="flux",
        media=("image",),
        model="FLUX.1",
        model_type="flux",
        default_model_name="black-forest-labs/FLUX.1-dev",
        spatial_factor=8,
        version=2,
        text_dtypes=("auto", "fp8"),
    )
    components = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    bytes_per_pixel = 1600  # 1.6 GB for 1024x1024 on an H200
    decoder_bytes_per_pixel = 4000  # 4.2 GB for the same

    def _prepare(self, model_name: str) -> None:
        self._clip: Any
        self._t5: Any
        vae, self._clip, self._t5, self._clip_tokenizer, self._t5_tokenizer = self._load(model_name)
        self._shift = vae.config.shift_factor or 0.0
        self._fused_clip: GraphedFunction | None = None
        self._fused_t5: GraphedFunction | None = None
        texts = TextEncoders(
            self._t5,
            self._t5.encoder,
            "block",
            others=[self._clip],
            caption_bytes=T5_LENGTH * token_bytes(self._t5.config, self._dtype),
            own_modules_factor=OWN_MODULES_FACTOR,
        )
        self._set_up(vae, texts)

    def _load(self, model_name: str) -> tuple[Any, ...]:
        """Load the VAE, the two text encoders and their tokenizers."""
        folder, dtype = self._folder(model_name, "diffusers", "transformers", "sentencepiece"), self._dtype
        from diffusers import AutoencoderKL
        from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

        with loading(folder):
            return (
                AutoencoderKL.from_pretrained(folder, subfolder="vae", torch_dtype=dtype),
                CLIPTextModel.from_pretrained(folder, subfolder="text_encoder", dtype=dtype),
                T5EncoderModel.from_pretrained(folder, subfolder="text_encoder_2", dtype=dtype),
                AutoTokenizer.from_pretrained(folder, subfolder="tokenizer"),
                AutoTokenizer.from_pretrained(folder, subfolder="tokenizer_2"),
            )

    def use_fused_encoders(self) -> None:
        self._encoder.use_fused_encoder(ImageEncoder)
        if (clip := checked_encoder(ClipEncoder, self._clip)) is not None:
            self._fused_clip = GraphedFunction(clip)
        if (t5 := checked_encoder(T5Encoder, self._t5)) is not None:
            self._fused_t5 = GraphedFunction(t5)

    def _graphed_texts(self) -> list[GraphedFunction]:
        return [graphed for graphed in (self._fused_clip, self._fused_t5) if graphed is not None]

    def _encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        scaled = scaled_pixels(pixels, self._device, self._dtype)
        if self._device.type == "cpu":
            # The memory layout of diffusers' image processor: it selects the same kernels, so the bits are the same.
            scaled = scaled.to(memory_format=torch.channels_last)
        latents = self._encoder.latents(scaled, seeds)
        stored: torch.Tensor = (latents - self._shift) * self._vae.config.scaling_factor
        return stored.to(torch.float16)

    def _encode_texts(self, captions: list[str]) -> StackedFields:
        clip_tokens, _ = padded_tokens(self._clip_tokenizer, captions, CLIP_LENGTH)
        t5_tokens, _ = padded_tokens(self._t5_tokenizer, captions, T5_LENGTH)
        on_device = to_device(clip_tokens, self._device)
        if self._fused_clip is not None:
            clip_states = self._fused_clip(on_device)
        else:
            clip_states = ClipEncoder.reference(self._clip, on_device)
        on_device = to_device(t5_tokens, self._device)
        if self._fused_t5 is not None:
            prompt_embeds = self._fused_t5(on_device)
        else:
            prompt_embeds = self._t5(on_device, output_hidden_states=False)[0]
        clip_states = clip_states.to(torch.bfloat16)
        return {
            "clip_tokens": clip_tokens,
            "clip_hidden": clip_states[:, :-1],
            "pooled_prompt_embeds": clip_states[:, -1],
            "t5_tokens": t5_tokens,
            "prompt_embeds": prompt_embeds.to(torch.bfloat16),
        }

    def _decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        latents = latents.to(self._device, self._dtype)
        latents = latents / self._vae.config.scaling_factor + self._shift
        return unscaled_pixels(self._vae.decode(latents, return_dict=False)[0])
