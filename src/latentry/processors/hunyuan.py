"""HunyuanVideo 1.5: its VAE, Qwen2.5-VL and ByT5 for text, and SigLIP for the first frame.

The text goes through static methods of diffusers' own pipeline, so the chat template and the quoted words that ByT5
sees are the pipeline's. A text-to-video checkpoint has no SigLIP, and its caches have no ``image_embeds``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from latentry.processors.base import StackedFields
from latentry.processors.diffusers_model import DiffusersProcessor
from latentry.processors.fused.hunyuan_vae import HunyuanEncoder
from latentry.processors.memory.text_encoders import TextEncoders
from latentry.processors.model_folder import loading
from latentry.processors.vae import scaled_pixels, to_device, unscaled_pixels
from latentry.types import ProcessorInfo

_QWEN_LENGTH = 1108
"""Tokens of a caption with its template, which the pipeline cuts off afterwards."""


class _LastNeededLayer(Exception):
    """Ends a forward pass with the output of a layer."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class _EarlyStates:
    """Stands for Qwen in the pipeline's method, which takes the third-last of all hidden states.

    Qwen itself would keep the states of all layers, which is more than everything else that it needs, and would compute
    two layers that nobody uses.
    """

    _INDEX = -3

    def __init__(self, qwen: Any) -> None:
        self._qwen = qwen

    def __call__(
        self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, output_hidden_states: bool
    ) -> Any:
        def stop(_layer: Any, _arguments: Any, output: Any) -> None:
            raise _LastNeededLayer(output[0] if isinstance(output, tuple) else output)

        # The last of the states comes after the norm, and the first before all layers.
        hook = self._qwen.layers[self._INDEX].register_forward_hook(stop)
        try:
            self._qwen(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        except _LastNeededLayer as reached:
            return SimpleNamespace(hidden_states={self._INDEX: reached.hidden})
        finally:
            hook.remove()
        raise AssertionError("Qwen has not called its layers")


class HunyuanProcessor(DiffusersProcessor):
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
        patch=1,
        latent_channels=32,
        version=2,
        text_dtypes=("auto", "fp8"),
    )
    components = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    optional_components = ("image_encoder", "feature_extractor")
    bytes_per_pixel = 1900  # 92 GB for 121 frames of 848x480 on an H200
    decoder_bytes_per_pixel = 3900  # 52 GB for 33 frames of the same
    one_by_one = True  # diffusers builds the attention mask for a single clip

    def _prepare(self, model_name: str) -> None:
        models = self._load(model_name)
        vae, self._qwen, self._byt5, self._tokenizer, self._tokenizer_2 = models[:5]
        self._siglip, self._image_processor = models[5:]
        config = self._qwen.config
        token_bytes = (2 * config.intermediate_size + 16 * config.hidden_size) * self._dtype.itemsize
        texts = TextEncoders(
            self._qwen,
            self._qwen,
            "layers",
            others=[self._byt5],
            caption_bytes=_QWEN_LENGTH * token_bytes,  # 6.7 GB for 32 captions on an H200
        )
        self._set_up(vae, texts, self._siglip)

    def _load(self, model_name: str) -> tuple[Any, ...]:
        """Load the VAE, the text encoders, their tokenizers, and SigLIP and its image processor, or None for both."""
        folder, dtype = self._folder(model_name, "diffusers", "transformers"), self._dtype
        from diffusers import AutoencoderKLHunyuanVideo15
        from transformers import (
            AutoTokenizer,
            Qwen2_5_VLTextModel,
            SiglipImageProcessorPil,
            SiglipVisionModel,
            T5EncoderModel,
        )

        siglip = image_processor = None
        with loading(folder):
            if all((folder / component).is_dir() for component in self.optional_components):
                siglip = SiglipVisionModel.from_pretrained(folder, subfolder="image_encoder", dtype=dtype)
                image_processor = SiglipImageProcessorPil.from_pretrained(
                    folder, subfolder="feature_extractor"
                )
            return (
                AutoencoderKLHunyuanVideo15.from_pretrained(folder, subfolder="vae", torch_dtype=dtype),
                Qwen2_5_VLTextModel.from_pretrained(folder, subfolder="text_encoder", dtype=dtype),
                T5EncoderModel.from_pretrained(folder, subfolder="text_encoder_2", dtype=dtype),
                AutoTokenizer.from_pretrained(folder, subfolder="tokenizer"),
                AutoTokenizer.from_pretrained(folder, subfolder="tokenizer_2"),
                siglip,
                image_processor,
            )

    def use_fused_encoders(self) -> None:
        self._encoder.use_fused_encoder(HunyuanEncoder)

    def _encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        latents = self._encoder.latents(scaled_pixels(pixels, self._device, self._dtype), seeds)
        scaled: torch.Tensor = latents * self._vae.config.scaling_factor
        return scaled.to(torch.float16)

    def _encode_texts(self, captions: list[str]) -> StackedFields:
        from diffusers import HunyuanVideo15Pipeline

        qwen, qwen_mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
            text_encoder=_EarlyStates(self._qwen),
            tokenizer=self._tokenizer,
            prompt=captions,
            device=self._device,
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
    def media_fields(self, pixels: torch.Tensor) -> StackedFields:
        """SigLIP's embedding of each clip's first frame, if the model has SigLIP."""
        if self._siglip is None:
            return {}
        from PIL import Image

        first = [Image.fromarray(clip[:, 0].permute(1, 2, 0).cpu().numpy()) for clip in pixels]
        images = self._image_processor.preprocess(
            images=first, do_resize=True, return_tensors="pt", do_convert_rgb=True
        )
        on_device = to_device(images["pixel_values"].to(self._dtype), self._device)
        with self._on_device("image_encoder"):
            hidden = self._siglip(pixel_values=on_device).last_hidden_state
        return {"image_embeds": hidden.to(torch.bfloat16)}

    def _decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        latents = latents.to(self._device, self._dtype) / self._vae.config.scaling_factor
        clips = [self._vae.decode(clip[None], return_dict=False)[0] for clip in latents]
        return unscaled_pixels(torch.cat(clips))
