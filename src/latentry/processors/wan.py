"""Wan 2.1 and 2.2: their causal video VAE and UMT5, as their own pipelines use them.

UMT5 is masked, so nothing depends on the padding. Embeddings are cut to the caption's length and padded with zeros. The
latents are normalised with the VAE's own mean and standard deviation per channel.
"""

from __future__ import annotations

from typing import Any

import torch

from latentry.errors import ModelError
from latentry.processors.base import StackedFields
from latentry.processors.diffusers_model import DiffusersProcessor
from latentry.processors.fused.self_check import checked_encoder
from latentry.processors.fused.t5 import OWN_MODULES_FACTOR, T5Encoder, token_bytes
from latentry.processors.fused.wan_vae import WanEncoder
from latentry.processors.memory.text_encoders import TextEncoders
from latentry.processors.model_folder import loading
from latentry.processors.tokens import padded_tokens
from latentry.processors.vae import scaled_pixels, to_device, unscaled_pixels
from latentry.types import ProcessorInfo

TEXT_LENGTH = 226
_LENGTH_STEP = 32
"""The fused UMT5 encodes captions in groups whose padded lengths are multiples of this."""


class WanProcessor(DiffusersProcessor):
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
        text_dtypes=("auto", "fp8"),
    )
    components = ("vae", "text_encoder", "tokenizer")
    bytes_per_pixel = 130  # 4 GB for 81 frames of 832x480 on an H200
    decoder_bytes_per_pixel = 180  # 4.7 GB for the same

    def _prepare(self, model_name: str) -> None:
        self._umt5: Any
        vae, self._umt5, self._tokenizer = self._load(model_name)
        # Checkpoints hold the embedding once, as shared.weight. Some releases of transformers 5 leave the encoder's
        # copy empty, and then every text has the same embedding.
        self._umt5.encoder.embed_tokens.weight = self._umt5.shared.weight
        device, dtype = self._device, self._dtype
        shape = (1, vae.config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(vae.config.latents_mean).view(shape).to(device, dtype)
        self._inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(device, dtype)
        self._fused_umt5: T5Encoder | None = None
        config = self._umt5.config
        masked_bias = 2 * config.num_heads * TEXT_LENGTH * dtype.itemsize
        texts = TextEncoders(
            self._umt5,
            self._umt5.encoder,
            "block",
            caption_bytes=TEXT_LENGTH * (token_bytes(config, dtype) + masked_bias),
            own_modules_factor=OWN_MODULES_FACTOR,
        )
        self._set_up(vae, texts)

    def _load(self, model_name: str) -> tuple[Any, ...]:
        """Load the VAE, the text encoder and its tokenizer."""
        # Without ftfy the pipeline silently cleans prompts less, and embeds another text.
        folder = self._folder(model_name, "diffusers", "transformers", "sentencepiece", "ftfy")
        from diffusers import AutoencoderKLWan
        from transformers import AutoTokenizer, UMT5EncoderModel

        with loading(folder):
            vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=self._dtype)
            if vae.config.scale_factor_spatial != self.info.spatial_factor:
                raise ModelError(
                    f"the VAE in {folder} has {vae.config.scale_factor_spatial} pixels per latent position, but the "
                    f"processor {self.info.name} is for models with {self.info.spatial_factor}; choose such a model"
                )
            return (
                vae,
                UMT5EncoderModel.from_pretrained(folder, subfolder="text_encoder", dtype=self._dtype),
                AutoTokenizer.from_pretrained(folder, subfolder="tokenizer"),
            )

    def use_fused_encoders(self) -> None:
        self._encoder.use_fused_encoder(WanEncoder)
        self._fused_umt5 = checked_encoder(T5Encoder, self._umt5)

    def _encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        latents = self._encoder.latents(scaled_pixels(pixels, self._device, self._dtype), seeds)
        return ((latents - self._mean) * self._inverse_std).to(torch.float16)

    def _encode_texts(self, captions: list[str]) -> StackedFields:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        cleaned = [prompt_clean(caption) for caption in captions]
        ids, mask = padded_tokens(self._tokenizer, cleaned, TEXT_LENGTH)
        if self._fused_umt5 is None:
            hidden = self._umt5(ids.to(self._device), mask.to(self._device)).last_hidden_state
        else:
            hidden = self._encode_by_length(self._fused_umt5, ids, mask)
        hidden = hidden.masked_fill(to_device(mask, self._device)[:, :, None] == 0, 0)
        return {"text_embeddings": hidden.to(torch.bfloat16)}

    def _encode_by_length(self, encoder: T5Encoder, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Encode captions of similar length together, without the padding that the mask would hide."""
        lengths = (mask.sum(dim=1) + _LENGTH_STEP - 1) // _LENGTH_STEP * _LENGTH_STEP
        lengths = lengths.clamp(max=ids.shape[1])
        hidden = torch.zeros(*ids.shape, self._umt5.config.d_model, dtype=self._dtype, device=self._device)
        for length in sorted(set(lengths.tolist())):
            rows = (lengths == length).nonzero().flatten()
            part = (to_device(ids[rows, :length], self._device), to_device(mask[rows, :length], self._device))
            hidden[:, :length].index_copy_(0, to_device(rows, self._device), encoder(*part))
        return hidden

    def _decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        latents = latents.to(self._device, self._dtype) / self._inverse_std + self._mean
        return unscaled_pixels(self._vae.decode(latents, return_dict=False)[0])


class Wan22Processor(WanProcessor):
    """The large models of Wan 2.2, which kept the VAE and the text encoder of Wan 2.1. Not for its 5B model."""

    info = ProcessorInfo(
        name="wan2.2",
        media=("video",),
        model="Wan 2.2",
        model_type="wan22",
        model_version="wan2.2",
        default_model_name="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        spatial_factor=8,
        temporal_factor=4,
        quantum=16,
        text_dtypes=("auto", "fp8"),
    )
