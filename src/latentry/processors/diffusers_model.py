"""What processors of models in the diffusers layout share: finding, identifying and loading a model, and its VAE."""

from __future__ import annotations

import hashlib
import importlib.util
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
from latentry.processors.vae import VaeEncoder, tiled_decoding
from latentry.storage import content_digest

logger = logging.getLogger(__name__)

_INSTALL = "pip install 'latentry[models]'"


def require_packages(*packages: str) -> None:
    """Raise an error that names the install command if one of these packages is missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(f"this processor needs {', '.join(missing)}; install with: {_INSTALL}")


def model_folder(
    model_name: str, components: tuple[str, ...], optional: tuple[str, ...] = (), *, download: bool = True
) -> Path:
    """The folder that holds these components: ``model_name`` if it is a folder, else a download from the hub.

    Args:
        model_name: A folder or a hub name.
        components: The folders that the model must have.
        optional: Folders that it may have.
        download: Ask the hub. Otherwise only what was downloaded before is used.
    """
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        folder = _from_hub(model_name, components + optional, download=download)
    missing = [name for name in components if not (folder / name).is_dir()]
    if missing:
        raise ModelError(
            f"{folder} has no folder {', '.join(missing)}; a model in the diffusers layout has "
            f"{', '.join(components)} beside its model_index.json"
        )
    return folder


def _from_hub(model_name: str, components: tuple[str, ...], *, download: bool) -> Path:
    require_packages("huggingface_hub")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["model_index.json", *(f"{component}/*" for component in components)]
        return Path(snapshot_download(model_name, allow_patterns=patterns, local_files_only=not download))
    except Exception as error:  # the client raises its own classes and those of its HTTP library
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"model {model_name!r} is not a folder, and it could not be downloaded from the hub "
            f"({type(error).__name__}: {reason}); download it first and pass its folder as --model_name"
        ) from None


def folder_identity(folder: Path, components: tuple[str, ...]) -> str:
    """A digest of the components' files."""
    digest = hashlib.blake2b(digest_size=16)
    for component in components:
        for path in sorted(p for p in (folder / component).rglob("*") if p.is_file()):
            digest.update(f"{path.relative_to(folder).as_posix()} {content_digest(path)}\n".encode())
    return digest.hexdigest()


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Raise errors of the model libraries as one ``ModelError``, and hide their progress bars."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    shown = [library for library in (of_diffusers, of_transformers) if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"the model in {folder} cannot be loaded: {reason}") from None
    finally:
        for library in shown:
            library.enable_progress_bar()


def padded_tokens(tokenizer: Any, captions: list[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B,length] and their mask, truncated and padded as the tokenizer itself does it.

    The tokenizer's own padding creates a Python integer for every position, which takes several times as long as the
    tokenizing.
    """
    if tokenizer.pad_token_id is None:
        raise ModelError(
            f"the model's {type(tokenizer).__name__} has no padding token; its folder is incomplete"
        )
    found = tokenizer(captions, max_length=length, truncation=True, return_attention_mask=False).input_ids
    tokens = torch.full((len(captions), length), tokenizer.pad_token_id)
    mask = torch.zeros_like(tokens)
    for i, ids in enumerate(found):
        span = slice(len(ids)) if tokenizer.padding_side == "right" else slice(length - len(ids), None)
        tokens[i, span] = torch.tensor(ids)
        mask[i, span] = 1
    return tokens, mask


class DiffusersProcessor(Processor, ABC):
    """The common part of processors for diffusers models. A family adds its loading, its normalisation and its text.

    A subclass loads its models into main memory, passes them to ``_set_up``, and overrides the abstract methods. This
    class decides what is on the device and when, and splits batches that would not fit.
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
        self, device: torch.device, dtype: torch.dtype, text_dtype: str, device_memory: float
    ) -> None:
        self._device, self._dtype = device, dtype
        self._text_dtype, self._device_memory = text_dtype, device_memory
        if text_dtype == "fp8":
            fp8.require_support(device)

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
        self.memory_plan = self._plan(self._device_memory)
        logger.info("%s on %s: %s", self.info.name, self._device, self.memory_plan)
        self._place()
        if runs_fused_encoders(self._device):
            with self.text_pass():
                self.use_fused_encoders()
            self._apply_plan()

    # ---- device memory ----------------------------------------------------------------------

    def _plan(self, budget: float) -> MemoryPlan:
        sizes = ModelSizes(
            vae_encoder=num_bytes(self._always_on_device()),
            **{name: num_bytes(weights) for name, weights in self._sometimes_on_device().items()},
            num_text_layers=len(self._texts.layers),
            text_layer=self._texts.layer_bytes,
            other_text=self._texts.other_bytes + fp8.working_bytes(self._texts.layers),
            caption=self._texts.caption_bytes,
        )
        if self._device.type == "mps":
            # Its memory is main memory: weights that wait there would take just as much of it.
            budget = max(budget, sizes.budget_for_all)
        return plan_memory(sizes, budget)

    def _sometimes_on_device(self) -> dict[str, list[torch.Tensor]]:
        """The weights that a batch needs for a moment. Where memory is short, they are in main memory otherwise."""
        return {name: weights_of(module) for name, module in self._occasional.items() if module is not None}

    def _always_on_device(self) -> list[torch.Tensor]:
        others = {id(tensor) for weights in self._sometimes_on_device().values() for tensor in weights}
        return [tensor for tensor in weights_of(self._vae) if id(tensor) not in others]

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
        too_much = self._device_memory
        self._device_memory = min(0.75 * too_much, available_memory(self._device) + held)
        if math.isinf(self._device_memory):
            return False  # a CPU
        before = self.memory_plan
        try:
            self.memory_plan = self._plan(self._device_memory)
        except RunError:
            raise RunError(
                f"the device ran out of memory with a budget of {gigabytes(too_much)}, and there is no smaller plan; "
                f"about {gigabytes(1.25 * too_much)} would do: free memory on the device, or choose a smaller resolution or "
                "fewer frames"
            ) from None
        if self.memory_plan == before:
            return False
        logger.warning(
            "the device ran out of memory: encoding continues with %s of it (%s)",
            gigabytes(self._device_memory),
            self.memory_plan,
        )
        self._place()
        return True

    # ---- the methods of a processor ---------------------------------------------------------

    def max_batch_size(self, shape: Sequence[int], most: int) -> int:
        return max(1, self._encoder.max_batch_size(shape, most))

    @torch.inference_mode()
    def encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
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
        """Decode one sample after the other where memory is tight, and in tiles if that is still too much."""
        needed = self.decoder_bytes_per_pixel * math.prod(latents.shape[2:])
        needed *= self.info.spatial_factor**2 * self._dtype.itemsize // 2
        needed *= self.info.temporal_factor if latents.ndim == 5 else 1
        memory_bytes = self.memory_plan.pixel_bytes
        if self.memory_plan.num_graphs < 2:
            self._encoder.stop_graphs()  # their memory is needed for decoding, after each batch
        if "decoder" in self._offloaded:
            memory_bytes -= self._offloaded["decoder"].num_bytes
        step = len(latents) if len(latents) * needed <= memory_bytes else 1
        tiles = tiled_decoding(self._vae) if needed > memory_bytes else nullcontext()
        with self._on_device("decoder"), tiles:
            return _joined([self._decode_latents(part) for part in torch.split(latents, step)])

    def media_fields(self, pixels: torch.Tensor) -> StackedFields:
        return {}

    # ---- what a family adds -----------------------------------------------------------------

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
