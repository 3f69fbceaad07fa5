"""The processor protocol: what the rest of Latentry needs from a model family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from latentry.types import ProcessorInfo

Fields = dict[str, torch.Tensor]
"""Tensors of one sample, by their key in the cache file. The first dimension has size 1."""
StackedFields = dict[str, torch.Tensor]
"""Tensors of several samples, by their key in the cache file. Row i along the first dimension belongs to sample i."""


class Processor(Protocol):
    """One loaded model. Its numbers are those of the model's own diffusers pipeline.

    A class that inherits from this one gets the methods about device memory, which it may leave as they are.

    Returned tensors may be on the device, and the device may still be computing them. The caller copies them to main
    memory.
    """

    info: ProcessorInfo

    def __init__(
        self,
        model_name: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        text_dtype: str = "auto",
        device_memory: float = math.inf,
    ) -> None:
        """Load the model.

        Args:
            model_name: A folder in the diffusers layout, or a name on the Hugging Face hub.
            device: Where to encode.
            dtype: The precision in which the model runs.
            text_dtype: The precision of the text encoders' weights: ``auto`` for that of the model, or ``fp8``.
            device_memory: The bytes of the device's memory that the processor may use.
        """

    @classmethod
    def weights_identity(cls, model_name: str, *, download: bool = True) -> str:
        """Identify the weights without loading them: other weights have another identity.

        Args:
            model_name: As for the constructor.
            download: Download weights that are not on this machine. Otherwise they are a ``ModelError``.
        """

    def encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        """Encode samples to latents [B,C,h,w] or [B,C,t,h,w], in the dtype in which they are stored.

        Args:
            pixels: uint8 [B,3,H,W], or [B,3,T,H,W] for video.
            seeds: One per sample, to draw each latent from its posterior. None takes the posterior's mode.
        """

    def encode_texts(self, captions: list[str]) -> StackedFields:
        """Encode captions to the fields that their samples have in the cache.

        Args:
            captions: Any number of captions; row i of each column belongs to caption i.
        """

    def media_fields(self, pixels: torch.Tensor) -> StackedFields:
        """Compute the fields, besides the latents, that depend on the pixels. Most models have none.

        Args:
            pixels: As for ``encode_pixels``.
        """

    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode stored latents to uint8 pixels, on the device.

        Args:
            latents: As ``encode_pixels`` returned them.
        """

    def max_batch_size(self, shape: Sequence[int], most: int) -> int:
        """How many samples can be encoded together in the device's memory. The default is as many as asked for.

        Args:
            shape: The shape of one sample, [3,H,W] or [3,T,H,W].
            most: The answer is at most this.
        """
        return most

    @property
    def takes_turns(self) -> bool:
        """Whether the text encoders are on the device only during a ``text_pass``. False by default."""
        return False

    def text_pass(self) -> AbstractContextManager[None]:
        """A context in which many captions are to be encoded, if text encoders and VAE take turns on the device."""
        return nullcontext()

    def use_less_memory(self) -> bool:
        """Use less device memory from now on, because it ran out. Return False if that is not possible, the default.

        If it is possible in general, but no longer, that is a ``RunError`` that says how much memory would do.
        """
        return False
