"""What knows a model family: its encoders, its normalisation, its latent layout.

``PROCESSORS`` is a plain dictionary of names to where each lives; a family's file is imported when it is
used, and its heavy packages when its model is loaded. ``docs/adding-a-processor.md`` shows how to add one.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch

from latentry.errors import ConfigError
from latentry.records import ProcessorInfo

Fields = dict[str, torch.Tensor]
"""Some keys of a cache file, for one sample."""

PROCESSORS: dict[str, str] = {
    "tiny": "latentry.processors.tiny:TinyProcessor",
    "flux": "latentry.processors.flux:FluxProcessor",
}


class Processor(Protocol):
    """One loaded model. All numbers are those of the model's own pipeline."""

    info: ProcessorInfo

    def __init__(self, model_name: str, device: torch.device, dtype: torch.dtype) -> None: ...

    @classmethod
    def weights_identity(cls, model_name: str) -> str:
        """Names the weights, without loading them: another name means other latents."""

    def encode_images(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        """uint8 [B,3,H,W] to latents [B,C,h,w] as they are stored; ``seeds`` samples instead of the mean."""

    def encode_texts(self, captions: list[str]) -> list[Fields]:
        """For each caption the fields that its samples' files hold."""

    def decode_images(self, latents: torch.Tensor) -> torch.Tensor:
        """Stored latents [B,C,h,w] back to uint8 [B,3,H,W]."""


def processor_class(name: str) -> type[Processor]:
    """The class of this name: ``processor_class("flux")(model_name, device, dtype)``."""
    if name not in PROCESSORS:
        raise ConfigError(f"unknown processor {name!r}; choose one of {', '.join(PROCESSORS)}")
    module, _, attribute = PROCESSORS[name].partition(":")
    found: type[Processor] = getattr(importlib.import_module(module), attribute)
    return found
