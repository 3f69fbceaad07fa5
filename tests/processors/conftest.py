"""Tiny models, one for each fused encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture
def load_model(flux_folder, wan_folder, hunyuan_folder) -> Callable[..., torch.nn.Module]:
    """``load_model("wan_vae", dtype=torch.float32)``, with weights that are random everywhere.

    Fresh models have biases of zero and norms of one. Changed ones show an encoder that leaves them out.
    """

    def load(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        import diffusers
        import transformers

        library, kind, folder, subfolder = {
            "image_vae": (diffusers, "AutoencoderKL", flux_folder, "vae"),
            "wan_vae": (diffusers, "AutoencoderKLWan", wan_folder, "vae"),
            "hunyuan_vae": (diffusers, "AutoencoderKLHunyuanVideo15", hunyuan_folder, "vae"),
            "clip": (transformers, "CLIPTextModel", flux_folder, "text_encoder"),
            "t5": (transformers, "T5EncoderModel", flux_folder, "text_encoder_2"),
            "umt5": (transformers, "UMT5EncoderModel", wan_folder, "text_encoder"),
        }[name]
        model = getattr(library, kind).from_pretrained(folder, subfolder=subfolder)
        if name == "umt5":
            model.encoder.embed_tokens.weight = model.shared.weight
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        return model.to(dtype).eval().requires_grad_(False)

    return load


@pytest.fixture
def model_folder(flux_folder, wan_folder, hunyuan_folder) -> Callable[[str], Path]:
    """The folder of a family's tiny model, by the name of its processor."""
    return {"flux": flux_folder, "wan": wan_folder, "hunyuan": hunyuan_folder}.__getitem__
