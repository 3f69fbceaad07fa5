"""HunyuanVideo 1.5: its VAE, Qwen2.5-VL and ByT5 for text, and SigLIP for the first frame.

The text goes through the pipeline's own static methods: its chat template and the quoted words that ByT5
sees are then the pipeline's by construction. A text-to-video checkpoint has no SigLIP; its caches have no
``image_embeds``.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image

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

_COMPONENTS = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
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
        encode_bytes_per_pixel=1900,  # 92 GB for 121 frames of 848x480 on an H200
    )

    def __init__(self, model_name: str, device: torch.device, dtype: torch.dtype) -> None:
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
        self._device, self._dtype = device, dtype
        with loading(folder):
            self._vae: Any = AutoencoderKLHunyuanVideo15.from_pretrained(
                folder, subfolder="vae", torch_dtype=dtype
            )
            self._qwen: Any = Qwen2_5_VLTextModel.from_pretrained(
                folder, subfolder="text_encoder", dtype=dtype
            )
            self._byt5: Any = T5EncoderModel.from_pretrained(folder, subfolder="text_encoder_2", dtype=dtype)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
            self._tokenizer_2: Any = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer_2")
            self._siglip: Any = None
            if all((folder / component).is_dir() for component in _IMAGE_COMPONENTS):
                self._siglip = SiglipVisionModel.from_pretrained(
                    folder, subfolder="image_encoder", dtype=dtype
                )
                self._features = SiglipImageProcessorPil.from_pretrained(
                    folder, subfolder="feature_extractor"
                )
        for module in filter(None, (self._vae, self._qwen, self._byt5, self._siglip)):
            module.to(device).eval().requires_grad_(False)

    @classmethod
    def weights_identity(cls, model_name: str) -> str:
        folder = model_folder(model_name, _COMPONENTS, optional=_IMAGE_COMPONENTS)
        return folder_identity(folder, _COMPONENTS + _IMAGE_COMPONENTS)

    @torch.inference_mode()
    def encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        posterior = self._vae.encode(scaled_pixels(pixels, self._device, self._dtype)).latent_dist
        latents = posterior.mode() if seeds is None else draw(posterior, seeds)
        stored: torch.Tensor = (latents * self._vae.config.scaling_factor).to(torch.float16)
        return stored

    @torch.inference_mode()
    def encode_texts(self, captions: list[str]) -> list[Fields]:
        from diffusers import HunyuanVideo15Pipeline

        qwen, qwen_mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
            text_encoder=self._qwen, tokenizer=self._tokenizer, prompt=captions, device=self._device
        )
        byt5, byt5_mask = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
            tokenizer=self._tokenizer_2, text_encoder=self._byt5, prompt=captions, device=self._device
        )
        columns = {
            "text_embeddings": qwen.to(torch.bfloat16).cpu(),
            "text_mask": qwen_mask.cpu(),
            "text_embeddings_2": byt5.to(torch.bfloat16).cpu(),
            "text_mask_2": byt5_mask.cpu(),
        }
        return [{key: column[i : i + 1] for key, column in columns.items()} for i in range(len(captions))]

    @torch.inference_mode()
    def media_fields(self, pixels: torch.Tensor) -> list[Fields]:
        if self._siglip is None:
            return [{} for _ in pixels]
        first = [Image.fromarray(clip[:, 0].permute(1, 2, 0).cpu().numpy()) for clip in pixels]
        features = self._features.preprocess(
            images=first, do_resize=True, return_tensors="pt", do_convert_rgb=True
        )
        hidden = self._siglip(**features.to(device=self._device, dtype=self._dtype)).last_hidden_state
        return [{"image_embeds": hidden[i : i + 1].to(torch.bfloat16).cpu()} for i in range(len(first))]

    @torch.inference_mode()
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        latents = latents.to(self._device, self._dtype) / self._vae.config.scaling_factor
        return unscaled_pixels(self._vae.decode(latents, return_dict=False)[0])

    def enable_tiling(self) -> bool:
        return tile(self._vae)
