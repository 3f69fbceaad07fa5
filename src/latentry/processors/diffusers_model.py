"""What processors of models in the diffusers layout share: finding, identifying and loading a model, and its VAE."""

from __future__ import annotations

import hashlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from latentry.errors import ModelError
from latentry.processors import fp8
from latentry.processors.base import StackedFields
from latentry.processors.vae import VaeEncoder
from latentry.storage import content_digest
from latentry.types import ProcessorInfo

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


class DiffusersProcessor(ABC):
    """The common part of processors for diffusers models. A family adds its loading, its normalisation and its text.

    A subclass loads its models, passes them to ``_set_up``, and overrides ``use_fused_encoders``.
    """

    info: ClassVar[ProcessorInfo]
    components: ClassVar[tuple[str, ...]]
    """The folders of the model that the processor loads."""
    optional_components: ClassVar[tuple[str, ...]] = ()
    """Folders that it loads if the model has them."""
    bytes_per_pixel: ClassVar[int]
    """Device memory that the VAE's own modules need for each pixel of each frame, in 16 bits."""
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

    def _set_up(self, vae: Any, *others: Any) -> None:
        """Prepare the loaded models for encoding. On a GPU, switch to the fused encoders."""
        for model in (vae, *others):
            model.to(self._device).eval().requires_grad_(False)
        self._vae = vae
        self._encoder = VaeEncoder(vae, self.bytes_per_pixel, one_by_one=self.one_by_one)
        if self._device.type == "cuda":
            self.use_fused_encoders()

    def _quantize_texts(self, layers: torch.nn.Module) -> None:
        """Store the weights of a text encoder's layers in 8 bits if the recipe asks for it, before ``_set_up``."""
        if self._text_dtype == "fp8" and not fp8.quantize(layers, self._device):
            raise ModelError(
                f"the text encoder of {self.info.name} has no linear layers to quantise; leave out text_dtype"
            )

    @abstractmethod
    def use_fused_encoders(self) -> None:
        """Encode with the family's fused encoders: the same numbers up to rounding, several times faster.

        Each is checked against the model's own modules first. The model's own modules stay in use if a check fails.
        """

    @classmethod
    def weights_identity(cls, model_name: str, *, download: bool = True) -> str:
        folder = model_folder(model_name, cls.components, cls.optional_components, download=download)
        return folder_identity(folder, cls.components + cls.optional_components)

    def media_fields(self, pixels: torch.Tensor) -> StackedFields:
        return {}

    def bytes_needed(self, pixels: torch.Tensor) -> int:
        return self._encoder.bytes_needed(pixels)

    def enable_tiling(self) -> bool:
        return self._encoder.enable_tiling()
