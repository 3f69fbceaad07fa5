"""What knows a model family: its encoders, its normalisation, its latent layout.

``PROCESSORS`` is a plain dictionary of names to where each lives; a family's file is imported when it is
used, and its heavy packages when its model is loaded. ``docs/adding-a-processor.md`` shows how to add one.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch

from latentry.errors import ConfigError
from latentry.types import ProcessorInfo

Fields = dict[str, torch.Tensor]
"""Some keys of a cache file, for one sample."""
Columns = dict[str, torch.Tensor]
"""The same for several samples, one after the other along the first dimension."""

PROCESSORS: dict[str, str] = {
    "tiny": "latentry.processors.tiny:TinyProcessor",
    "flux": "latentry.processors.flux:FluxProcessor",
    "wan": "latentry.processors.wan:WanProcessor",
    "hunyuan": "latentry.processors.hunyuan:HunyuanProcessor",
}


class Processor(Protocol):
    """One loaded model. All numbers are those of the model's own pipeline.

    What it returns may lie on its device, still being computed; whoever wants it copies it from there.
    """

    info: ProcessorInfo

    def __init__(self, model_name: str, device: torch.device, dtype: torch.dtype) -> None: ...

    @classmethod
    def weights_identity(cls, model_name: str) -> str:
        """Names the weights, without loading them: another name means other latents."""

    def encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        """uint8 [B,3,H,W] or [B,3,T,H,W] to latents [B,C,h,w] or [B,C,t,h,w] as they are stored.

        ``seeds``, one per sample, draws from the posterior instead of taking its mean.
        """

    def encode_texts(self, captions: list[str]) -> Columns:
        """The fields that the captions' samples have in their files."""

    def media_fields(self, pixels: torch.Tensor) -> Columns:
        """The fields, besides latents, that come from the samples' pixels; mostly none."""

    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Stored latents back to uint8 pixels, on the device."""

    def bytes_needed(self, pixels: torch.Tensor) -> int:
        """Device memory that encoding these takes, as far as it is known; 0 if it is not."""

    def enable_tiling(self) -> bool:
        """Encode in tiles from now on, to need less memory; False if that is so already, or cannot be."""


def processor_class(name: str) -> type[Processor]:
    """The class of this name: ``processor_class("flux")(model_name, device, dtype)``."""
    if name not in PROCESSORS:
        raise ConfigError(f"unknown processor {name!r}; choose one of {', '.join(PROCESSORS)}")
    module, _, attribute = PROCESSORS[name].partition(":")
    found: type[Processor] = getattr(importlib.import_module(module), attribute)
    return found
