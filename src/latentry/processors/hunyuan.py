"""HunyuanVideo 1.5: its VAE, Qwen2.5-VL and ByT5 for text, and SigLIP for the first frame.

The text goes through the pipeline's own static methods: its chat template and the quoted words that ByT5
sees are then the pipeline's by construction. A text-to-video checkpoint has no SigLIP; its caches have no
``image_embeds``.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image

from latentry.processors import Columns
from latentry.processors.diffusers_model import (
    VaeEncoder,
    draw,
    folder_identity,
    loading,
    model_folder,
    require_packages,
    scaled_pixels,
    tile,
    to_device,
    unscaled_pixels,
)
from latentry.processors.fused.hunyuan_vae import HunyuanEncoder
from latentry.types import ProcessorInfo

_COMPONENTS = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
_BYTES_PER_PIXEL = 1900  # of all frames, in 16 bits; 92 GB for 121 frames of 848x480 on an H200
_IMAGE_COMPONENTS = ("image_encoder", "feature_extractor")


class HunyuanProcessor:
    info = ProcessorInfo(
        name="hunyuan",
        media=("video",),
        model="HunyuanVideo 1.5",
        model_type="hunyuan",
        model_version="hunyuanvideo-1.5",
        default_model_name="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
        spatial_factor=16,
        temporal_factor=4,
        quantum=16,
        latent_channels=32,
        version=2,
    )

    def __init__(self, model_name: str, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._vae: Any
        parts = self._load(model_name)
        self._vae, self._qwen, self._byt5, self._tokenizer, self._tokenizer_2 = parts[:5]
        self._siglip, self._features = parts[5:]
        for module in filter(None, (self._vae, self._qwen, self._byt5, self._siglip)):
            module.to(device).eval().requires_grad_(False)
        # Its attention mask is made for a single clip.
        self._encoder = VaeEncoder(self._vae, _BYTES_PER_PIXEL, one_by_one=True)
        self.bytes_needed = self._encoder.bytes_needed
        if device.type == "cuda":
            self.use_fused_encoder()

    def _load(self, model_name: str) -> tuple[Any, ...]:
        """The VAE, the text encoders, their tokenizers, SigLIP and what prepares pictures for it, or None twice."""
        require_packages("diffusers", "transformers")
        from diffusers import AutoencoderKLHunyuanVideo15
        from transformers import (
            AutoTokenizer,
            Qwen2_5_VLTextModel,
            SiglipImageProcessorPil,
            SiglipVisionModel,
            T5EncoderModel,
        )

        folder = model_folder(model_name, _COMPONENTS, optional=_IMAGE_COMPONENTS)
        dtype = self._dtype
        siglip = features = None
        with loading(folder):
            if all((folder / component).is_dir() for component in _IMAGE_COMPONENTS):
                siglip = SiglipVisionModel.from_pretrained(folder, subfolder="image_encoder", dtype=dtype)
                features = SiglipImageProcessorPil.from_pretrained(folder, subfolder="feature_extractor")
            return (
                AutoencoderKLHunyuanVideo15.from_pretrained(folder, subfolder="vae", torch_dtype=dtype),
                Qwen2_5_VLTextModel.from_pretrained(folder, subfolder="text_encoder", dtype=dtype),
                T5EncoderModel.from_pretrained(folder, subfolder="text_encoder_2", dtype=dtype),
                AutoTokenizer.from_pretrained(folder, subfolder="tokenizer"),
                AutoTokenizer.from_pretrained(folder, subfolder="tokenizer_2"),
                siglip,
                features,
            )

    def use_fused_encoder(self) -> None:
        """Encode by the quicker ways in ``gpu``: the same numbers, up to rounding."""
        self._encoder.use_fused_encoder(HunyuanEncoder)

    @classmethod
    def weights_identity(cls, model_name: str) -> str:
        folder = model_folder(model_name, _COMPONENTS, optional=_IMAGE_COMPONENTS)
        return folder_identity(folder, _COMPONENTS + _IMAGE_COMPONENTS)

    @torch.inference_mode()
    def encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        found = self._encoder.posterior(scaled_pixels(pixels, self._device, self._dtype))
        latents = found.mode() if seeds is None else draw(found, seeds)
        stored: torch.Tensor = (latents * self._vae.config.scaling_factor).to(torch.float16)
        return stored

    @torch.inference_mode()
    def encode_texts(self, captions: list[str]) -> Columns:
        from diffusers import HunyuanVideo15Pipeline

        qwen, qwen_mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
            text_encoder=self._qwen, tokenizer=self._tokenizer, prompt=captions, device=self._device
        )
        byt5, byt5_mask = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
            tokenizer=self._tokenizer_2, text_encoder=self._byt5, prompt=captions, device=self._device
        )
        return {
            "text_embeddings": qwen.to(torch.bfloat16),
            "text_mask": qwen_mask,
            "text_embeddings_2": byt5.to(torch.bfloat16),
            "text_mask_2": byt5_mask,
        }

    @torch.inference_mode()
    def media_fields(self, pixels: torch.Tensor) -> Columns:
        if self._siglip is None:
            return {}
        first = [Image.fromarray(clip[:, 0].permute(1, 2, 0).cpu().numpy()) for clip in pixels]
        features = self._features.preprocess(
            images=first, do_resize=True, return_tensors="pt", do_convert_rgb=True
        )
        shown = to_device(features["pixel_values"].to(self._dtype), self._device)
        hidden = self._siglip(pixel_values=shown).last_hidden_state
        return {"image_embeds": hidden.to(torch.bfloat16)}

    @torch.inference_mode()
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        latents = latents.to(self._device, self._dtype) / self._vae.config.scaling_factor
        clips = [self._vae.decode(clip[None], return_dict=False)[0] for clip in latents]
        return unscaled_pixels(torch.cat(clips))

    def enable_tiling(self) -> bool:
        return tile(self._vae)
