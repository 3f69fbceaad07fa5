"""The interface of a processor: load a model, encode media and text, make the dictionary of a cache file.

``load_models`` returns a dictionary that the other methods take. Its content belongs to the processor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

Models = dict[str, Any]
"""What ``load_models`` returned."""
Encodings = dict[str, torch.Tensor]
"""What ``encode_text`` returned."""


class BaseModelProcessor(ABC):
    """A processor of images. Subclass it and register the subclass with ``ProcessorRegistry.register``."""

    @property
    @abstractmethod
    def model_type(self) -> str:
        """The ``model_type`` recorded in cache files."""

    @property
    @abstractmethod
    def default_model_name(self) -> str:
        """The model that is loaded if the user names none."""

    @abstractmethod
    def load_models(self, model_name: str | None, device: str | torch.device) -> Models:
        """Load a model; None is the default one."""

    @abstractmethod
    def encode_image(
        self, image_tensor: torch.Tensor, models: Models, device: str | torch.device
    ) -> torch.Tensor:
        """The latent [C,h,w] of an image [3,H,W] or [1,3,H,W]: uint8, or floating point in -1 … 1."""

    @abstractmethod
    def encode_text(self, prompt: str, models: Models, device: str | torch.device) -> Encodings:
        """The tensors that a cache file holds for a caption, each with a leading dimension of 1."""

    @abstractmethod
    def verify_latent(self, latent: torch.Tensor, models: Models, device: str | torch.device) -> bool:
        """Whether the latent is finite and not constant, and decodes to finite pixels."""

    @abstractmethod
    def get_cache_data(
        self, latent: torch.Tensor, text_encodings: Encodings, metadata: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The dictionary of a cache file.

        ``metadata`` has ``original_resolution``, ``bucket_resolution``, ``prompt``, and ``image_path`` or
        ``video_path``. It may have ``bucket_id`` and ``crop_offset``.
        """


class BaseVideoProcessor(BaseModelProcessor):
    """A processor of videos."""

    @property
    @abstractmethod
    def frame_constraint(self) -> str:
        """The numbers of frames that the model accepts, such as ``4n+1``."""

    @property
    @abstractmethod
    def quantization(self) -> int:
        """The sides of buckets are multiples of this many pixels."""

    @abstractmethod
    def encode_video(
        self,
        video_tensor: torch.Tensor,
        models: Models,
        device: str | torch.device,
        deterministic: bool = True,
    ) -> torch.Tensor:
        """The latents [1,C,T,h,w] of a clip [1,3,T,H,W] or [3,T,H,W]: uint8, or floating point in -1 … 1."""

    def encode_image(
        self, image_tensor: torch.Tensor, models: Models, device: str | torch.device
    ) -> torch.Tensor:
        """The latents [1,C,1,h,w] of one frame."""
        frame = image_tensor if image_tensor.ndim == 4 else image_tensor[None]
        return self.encode_video(frame[:, :, None], models, device)
