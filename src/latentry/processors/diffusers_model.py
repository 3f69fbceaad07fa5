"""What all models in the diffusers layout share: being found, being named, being sampled from."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from latentry.errors import ModelError
from latentry.processors.fused.cuda_graphs import CudaGraphed
from latentry.storage import content_digest

_INSTALL = "pip install 'latentry[models]'"


def require_packages(*packages: str) -> None:
    """An error with the install command, if one of these packages is missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(f"this processor needs {', '.join(missing)}; install with: {_INSTALL}")


def model_folder(model_name: str, components: tuple[str, ...], optional: tuple[str, ...] = ()) -> Path:
    """The folder that holds these components: the name itself if it is one, else a download from the hub."""
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        folder = _from_hub(model_name, components + optional)
    missing = [name for name in components if not (folder / name).is_dir()]
    if missing:
        raise ModelError(
            f"{folder} has no folder {', '.join(missing)}; a model in the diffusers layout has "
            f"{', '.join(components)} beside its model_index.json"
        )
    return folder


def _from_hub(model_name: str, components: tuple[str, ...]) -> Path:
    require_packages("huggingface_hub")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["model_index.json", *(f"{component}/*" for component in components)]
        return Path(snapshot_download(model_name, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises a family of its own, and whatever its transport does
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"model {model_name!r} is neither a folder here nor could it be fetched from the hub "
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
    """Turns what the model libraries raise for missing or unusable files into one line, and quiets their bars."""
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"the model in {folder} cannot be loaded: {reason}") from None


def scaled_pixels(pixels: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """uint8 to -1 … 1, by the steps that diffusers' image processors take."""
    scaled = to_device(pixels, device).to(
        torch.float32, copy=True
    )  # then in place: a clip takes half a gigabyte
    return scaled.div_(255).mul_(2).sub_(1).to(dtype)


def unscaled_pixels(pixels: torch.Tensor) -> torch.Tensor:
    """-1 … 1 back to uint8."""
    return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for what the device is at: that needs page-locked memory."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def padded_tokens(tokenizer: Any, captions: list[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers [B,length] and their mask, cut off and filled up as the tokenizer itself would do it.

    Its own filling makes a Python number of every position and takes several times as long as its reading.
    """
    if tokenizer.pad_token_id is None:
        raise ModelError(
            f"the model's {type(tokenizer).__name__} has no padding token; its folder is incomplete"
        )
    found = tokenizer(captions, max_length=length, truncation=True, return_attention_mask=False).input_ids
    tokens = torch.full((len(captions), length), tokenizer.pad_token_id)
    mask = torch.zeros_like(tokens)
    for i, numbers in enumerate(found):
        there = (
            slice(len(numbers)) if tokenizer.padding_side == "right" else slice(length - len(numbers), None)
        )
        tokens[i, there] = torch.tensor(numbers)
        mask[i, there] = 1
    return tokens, mask


class VaeEncoder:
    """A VAE's encoder: its own, or the one arranged for a GPU."""

    def __init__(self, vae: Any, bytes_per_pixel: int, *, one_by_one: bool = False) -> None:
        self._vae = vae
        self._one_by_one = one_by_one
        self._bytes_per_pixel = bytes_per_pixel
        self._gpu_encoder: CudaGraphed | None = None
        self._gpu_bytes_needed: Callable[[torch.Tensor], int] | None = None

    def use_fused_encoder(self, family: Any) -> None:
        """Use this family of encoders, if it knows the VAE."""
        if family.supports(self._vae):
            encoder = family(self._vae)
            self._gpu_encoder = CudaGraphed(encoder)
            self._gpu_bytes_needed = getattr(encoder, "bytes_needed", None)

    def posterior(self, pixels: torch.Tensor) -> Any:
        """What ``vae.encode`` says of these pixels."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        if self._gpu_encoder is not None and not self._vae.use_tiling:
            return DiagonalGaussianDistribution(self._gpu_encoder(pixels))
        if not self._one_by_one or len(pixels) == 1:
            return self._vae.encode(pixels).latent_dist
        moments = [self._vae.encode(sample[None]).latent_dist.parameters for sample in pixels]
        return DiagonalGaussianDistribution(torch.cat(moments))

    def bytes_needed(self, pixels: torch.Tensor) -> int:
        """Device memory for the whole of it."""
        if self._gpu_bytes_needed is not None:
            return self._gpu_bytes_needed(pixels)
        needed: int = self._bytes_per_pixel * pixels.numel() // 3 * self._vae.dtype.itemsize // 2
        return needed


def draw(posterior: Any, seeds: list[int]) -> torch.Tensor:
    """One draw per sample from its own generator, so that neither batch nor order matters."""
    shape = posterior.mean.shape[1:]
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    drawn: torch.Tensor = posterior.mean + posterior.std * torch.stack(noise).to(posterior.mean)
    return drawn


def tile(vae: Any) -> bool:
    """Let a VAE encode in tiles; False if it does already."""
    if vae.use_tiling:
        return False
    vae.enable_tiling()
    return True
