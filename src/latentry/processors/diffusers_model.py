"""What processors of models in the diffusers layout share: what is on the device and when, and batches that fit."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch

from latentry.errors import ModelError, RunError
from latentry.hardware import available_memory, release_cached_memory, runs_fused_encoders
from latentry.processors import fp8
from latentry.processors.base import Processor, StackedFields
from latentry.processors.fused.cuda_graphs import GraphedFunction
from latentry.processors.memory.offload import OffloadedWeights, num_bytes, weights_of
from latentry.processors.memory.plan import MemoryPlan, ModelSizes, gigabytes, plan_memory
from latentry.processors.memory.text_encoders import TextEncoders
from latentry.processors.model_folder import folder_identity, model_folder, require_packages
from latentry.processors.tiles import decode_tiles, largest_tiles
from latentry.processors.vae import VaeEncoder

logger = logging.getLogger(__name__)


class DiffusersProcessor(Processor, ABC):
    """The common part of processors for diffusers models. A family adds its loading, its normalisation and its text.

    A subclass overrides the abstract methods. In ``_prepare`` it loads its models and passes them to ``_set_up``. This class
    decides what is on the device and when, and splits batches that would not fit.
    """

    components: ClassVar[tuple[str, ...]]
    """The folders of the model that the processor loads."""
    optional_components: ClassVar[tuple[str, ...]] = ()
    """Folders that it loads if the model has them."""
    bytes_per_pixel: ClassVar[int]
    """Device memory that the VAE's own modules need for each pixel of each frame, in 16 bits."""
    decoder_bytes_per_pixel: ClassVar[int]
    """The same for decoding."""
    one_by_one: ClassVar[bool] = False
    """Whether the VAE's own modules take only one sample at a time."""

    def __init__(
        self,
        model_name: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        text_dtype: str = "auto",
        device_memory: float = math.inf,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._text_dtype, self._device_memory = text_dtype, device_memory
        self._too_little = 0.0
        """The most memory that was there when it ran out."""
        if text_dtype == "fp8":
            fp8.require_support(device)
        self._prepare(model_name)

    def _folder(self, model_name: str, *packages: str) -> Path:
        """The model's folder, after a check that the packages to load it are installed."""
        require_packages(*packages)
        return model_folder(model_name, self.components, self.optional_components)

    def _set_up(self, vae: Any, texts: TextEncoders, image_encoder: Any = None) -> None:
        """Prepare the loaded models for encoding. On a GPU, switch to the fused encoders.

        Args:
            vae: The VAE, in main memory like the other models.
            texts: The text encoders.
            image_encoder: A model that makes further fields from pixels.
        """
        if self._text_dtype == "fp8" and not fp8.quantize(texts.layers, self._device):
            raise ModelError(
                f"the text encoder of {self.info.name} has no linear layers to quantise; leave out text_dtype"
            )
        self._vae, self._texts = vae, texts
        self._occasional = {"decoder": vae.decoder, "image_encoder": image_encoder}
        self._offloaded: dict[str, OffloadedWeights] = {}
        for module in filter(None, (vae, image_encoder)):
            module.eval().requires_grad_(False)
        self._encoder = VaeEncoder(
            vae, self.bytes_per_pixel, self.info.spatial_factor, one_by_one=self.one_by_one
        )
        self._use_budget()
        logger.info("%s on %s: %s", self.info.name, self._device, self.memory_plan)
        if runs_fused_encoders(self._device):
            with self.text_pass():
                self.use_fused_encoders()
            self._apply_plan()

    # ---- device memory ----------------------------------------------------------------------

    def _use_budget(self) -> None:
        """Make a plan for the budget, and put the weights where it wants them."""
        sizes = self._sizes()
        budget = self._device_memory
        if self._device.type == "mps":
            # Its memory is main memory: weights that wait there would take just as much of it.
            budget = max(budget, sizes.budget_for_all)
        self._plan_for_others = self._plan_for_large_samples = plan_memory(sizes, budget)
        if self._device.type != "mps" and math.isfinite(budget):
            self._plan_for_large_samples = plan_memory(sizes, budget, for_large_samples=True)
        # Text encoders that have left the device for a large sample do not come back to stay.
        self.memory_plan = self._plan_for_large_samples if self.takes_turns else self._plan_for_others
        self._place()

    def _plan_for(self, shape: Sequence[int]) -> MemoryPlan:
        """The plan whose memory decides how samples of a shape are encoded. It depends on budget and shape only.

        A sample that would have to be tiled beside the text encoders gets their memory, too.
        """
        fits = self._encoder.max_batch_size(shape, 1, self._plan_for_others.pixel_bytes)
        return self._plan_for_others if fits else self._plan_for_large_samples

    def _sizes(self) -> ModelSizes:
        return ModelSizes(
            vae_encoder=num_bytes(self._always_on_device()),
            **{name: num_bytes(weights) for name, weights in self._sometimes_on_device().items()},
            num_text_layers=len(self._texts.layers),
            text_layer=self._texts.layer_bytes,
            other_text=self._texts.other_bytes + fp8.working_bytes(self._texts.layers),
            caption=self._texts.caption_bytes(fused=runs_fused_encoders(self._device)),
        )

    def _sometimes_on_device(self) -> dict[str, list[torch.Tensor]]:
        """The weights that a batch needs for a moment. Where memory is short, they are in main memory otherwise."""
        return {name: weights_of(module) for name, module in self._occasional.items() if module is not None}

    def _always_on_device(self) -> list[torch.Tensor]:
        others = {id(tensor) for weights in self._sometimes_on_device().values() for tensor in weights}
        return [tensor for tensor in weights_of(self._vae) if id(tensor) not in others]

    @torch.inference_mode(False)
    def _place(self) -> None:
        """Put the weights where the plan wants them."""
        for tensor in self._always_on_device():
            tensor.data = tensor.data.to(self._device)
        for name, weights in self._sometimes_on_device().items():
            if self.memory_plan.text == "together":
                for tensor in weights:
                    tensor.data = tensor.data.to(self._device)
            elif name not in self._offloaded:
                self._offloaded[name] = OffloadedWeights(weights, self._device)
        self._texts.place(self.memory_plan, self._device)
        self._apply_plan()

    def _apply_plan(self) -> None:
        """Tell the encoders how much memory they have."""
        self._encoder.use_memory(self.memory_plan.pixel_bytes, self.memory_plan.num_graphs)
        for graphed in self._graphed_texts():
            graphed.release()
            graphed.max_graphs = 0 if self._texts.takes_turns else self.memory_plan.num_graphs

    def _graphed_texts(self) -> Iterable[GraphedFunction]:
        """The text encoders that run as CUDA graphs while their weights stay on the device."""
        return ()

    def _on_device(self, name: str) -> AbstractContextManager[None]:
        """Have the ``decoder`` or the ``image_encoder`` on the device inside the context."""
        return self._offloaded[name].on_device() if name in self._offloaded else nullcontext()

    @property
    def takes_turns(self) -> bool:
        return self._texts.takes_turns

    @contextmanager
    def text_pass(self) -> Iterator[None]:
        if self._texts.is_on_device:
            yield
            return
        self._encoder.release_graphs()
        release_cached_memory(self._device)
        with self._texts.on_device():
            yield
        release_cached_memory(self._device)

    def use_less_memory(self) -> bool:
        self._texts.close()
        self._encoder.release_graphs()
        release_cached_memory(self._device)
        weights = weights_of(self._vae, *filter(None, self._occasional.values())) + self._texts.weights
        held = num_bytes(tensor for tensor in weights if tensor.device.type == self._device.type)
        there = min(self._device_memory, available_memory(self._device) + held)
        if math.isinf(there):
            return False  # a CPU
        self._too_little = max(self._too_little, there)
        self._device_memory = min(0.75 * self._device_memory, there)
        before = self.memory_plan
        try:
            self._use_budget()
        except RunError:
            raise RunError(
                f"the device ran out of memory with {gigabytes(self._too_little)}, and there is no smaller plan; about "
                f"{gigabytes(1.25 * self._too_little)} would do: free memory on the device, or choose a smaller "
                "resolution or fewer frames"
            ) from None
        if self.memory_plan == before:
            return False
        logger.warning(
            "the device ran out of memory: encoding continues with %s of it (%s)",
            gigabytes(self._device_memory),
            self.memory_plan,
        )
        return True

    # ---- the methods of a processor ---------------------------------------------------------

    def max_batch_size(self, shape: Sequence[int], most: int) -> int:
        return max(1, self._encoder.max_batch_size(shape, most, self._plan_for(shape).pixel_bytes))

    @torch.inference_mode()
    def encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        plan = self._plan_for(pixels.shape[1:])
        if plan.text != "together" and self.memory_plan.text == "together":
            self.memory_plan = plan  # from now on: the next large sample may be near
            self._place()
        self._encoder.use_memory(plan.pixel_bytes, min(plan.num_graphs, self.memory_plan.num_graphs))
        size = self.max_batch_size(pixels.shape[1:], len(pixels))
        parts = [
            self._encode_pixels(pixels[start : start + size], seeds and seeds[start : start + size])
            for start in range(0, len(pixels), size)
        ]
        return _joined(parts)

    @torch.inference_mode()
    def encode_texts(self, captions: list[str]) -> StackedFields:
        size = self.memory_plan.text_batch_size
        with self.text_pass():
            parts = [
                self._encode_texts(captions[start : start + size]) for start in range(0, len(captions), size)
            ]
        return {key: _joined([part[key] for part in parts]) for key in parts[0]}

    @torch.inference_mode()
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode one sample after the other where memory is short, and in tiles if that is still too much."""
        memory_bytes = self.memory_plan.pixel_bytes
        if self.memory_plan.num_graphs < 2:
            self._encoder.stop_graphs()  # decoding needs their memory after each batch
        if "decoder" in self._offloaded:
            memory_bytes -= self._offloaded["decoder"].num_bytes
        factor = self.info.spatial_factor
        num_frames = 1 if latents.ndim == 4 else (latents.shape[2] - 1) * self.info.temporal_factor + 1
        pixel_bytes = self.decoder_bytes_per_pixel * num_frames * self._dtype.itemsize // 2
        height, width = (side * factor for side in latents.shape[-2:])

        def fits(tile_height: int, tile_width: int) -> bool:
            return tile_height * tile_width * pixel_bytes <= memory_bytes

        with self._on_device("decoder"):
            if fits(len(latents) * height, width):
                return self._decode_latents(latents)
            tiles = largest_tiles(height, width, 2 * factor, fits)
            decoded = [
                decode_tiles(self._decode_latents, sample, tiles, factor)
                for sample in torch.split(latents, 1)
            ]
        return torch.cat(decoded).round_().to(torch.uint8)

    def media_fields(self, pixels: torch.Tensor) -> StackedFields:
        return {}

    # ---- what a family adds -----------------------------------------------------------------

    @abstractmethod
    def _prepare(self, model_name: str) -> None:
        """Load the models into main memory, keep what encoding needs of them, and call ``_set_up``."""

    @abstractmethod
    def use_fused_encoders(self) -> None:
        """Encode with the family's fused encoders: the same numbers up to rounding, several times faster.

        Each is checked against the model's own modules first. The model's own modules stay in use if a check fails.
        """

    @abstractmethod
    def _encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        """Encode a batch that fits."""

    @abstractmethod
    def _encode_texts(self, captions: list[str]) -> StackedFields:
        """Encode a batch of captions that fits, while the text encoders are on the device."""

    @abstractmethod
    def _decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode a batch that fits, while the decoder is on the device."""

    @classmethod
    def weights_identity(cls, model_name: str, *, download: bool = True) -> str:
        folder = model_folder(model_name, cls.components, cls.optional_components, download=download)
        return folder_identity(folder, cls.components + cls.optional_components)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
