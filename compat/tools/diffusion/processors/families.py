"""The model families: Latentry's processors behind the interface of ``base``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from latentry.cache.latent_checks import latent_problem
from latentry.cache.write.sample_data import image_data, video_data
from latentry.errors import ConfigError, LatentryError
from latentry.hardware import available_memory
from latentry.processors import Processor, processor_class
from latentry.seeds import derived_seed
from latentry.types import Bucket, Caption, PlannedSample, ProcessorInfo, SourceFile
from tools.diffusion.processors.base import BaseModelProcessor, BaseVideoProcessor, Encodings, Models


class _Adapter(BaseModelProcessor):
    """What images and videos share."""

    name: ClassVar[str]
    """The processor's name in Latentry."""

    @property
    def info(self) -> ProcessorInfo:
        return processor_class(self.name).info

    @property
    def model_type(self) -> str:
        return self.info.model_type

    @property
    def default_model_name(self) -> str:
        return self.info.default_model_name

    def load_models(self, model_name: str | None, device: str | torch.device) -> Models:
        device = torch.device(device)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        processor = processor_class(self.name)(
            model_name or self.default_model_name, device, dtype, device_memory=available_memory(device)
        )
        return {"processor": processor}

    def encode_text(self, prompt: str, models: Models, device: str | torch.device) -> Encodings:
        return {key: column.cpu() for key, column in _loaded(models).encode_texts([prompt]).items()}

    def verify_latent(self, latent: torch.Tensor, models: Models, device: str | torch.device) -> bool:
        if latent_problem(latent) is not None:
            return False
        batch = latent[None] if latent.ndim == (4 if isinstance(self, BaseVideoProcessor) else 3) else latent
        try:
            _loaded(models).decode_latents(batch)
        except (LatentryError, RuntimeError):
            return False
        return True


class FluxProcessor(_Adapter):
    """FLUX.1."""

    name = "flux"

    def encode_image(
        self, image_tensor: torch.Tensor, models: Models, device: str | torch.device
    ) -> torch.Tensor:
        batch = image_tensor if image_tensor.ndim == 4 else image_tensor[None]
        return _loaded(models).encode_pixels(_as_pixels(batch), None)[0].cpu()

    def get_cache_data(
        self, latent: torch.Tensor, text_encodings: Encodings, metadata: Mapping[str, Any]
    ) -> dict[str, Any]:
        sample, path = _planned(metadata, "image_path", num_frames=None)
        offset = _pair(metadata, "crop_offset", (0, 0))
        return image_data(sample, latent.cpu(), dict(text_encodings), offset, path, self.info)


class _VideoAdapter(_Adapter, BaseVideoProcessor):
    @property
    def frame_constraint(self) -> str:
        return self.info.frame_rule

    @property
    def quantization(self) -> int:
        return self.info.quantum

    def encode_video(
        self,
        video_tensor: torch.Tensor,
        models: Models,
        device: str | torch.device,
        deterministic: bool = True,
    ) -> torch.Tensor:
        batch = video_tensor if video_tensor.ndim == 5 else video_tensor[None]
        seeds = None if deterministic else [derived_seed("latent", i) for i in range(len(batch))]
        return _loaded(models).encode_pixels(_as_pixels(batch), seeds).cpu()

    def encode_first_frame(
        self, first_frame: torch.Tensor, models: Models, device: str | torch.device
    ) -> torch.Tensor | None:
        """``image_embeds`` of a frame, uint8 [H,W,3]; None if the model has no image encoder."""
        clip = first_frame.permute(2, 0, 1)[None, :, None]
        found = _loaded(models).media_fields(clip).get("image_embeds")
        return None if found is None else found.cpu()

    def get_cache_data(
        self, latent: torch.Tensor, text_encodings: Encodings, metadata: Mapping[str, Any]
    ) -> dict[str, Any]:
        """As documented there; ``metadata`` also has ``num_frames``.

        It may have ``first_frame``, ``image_embeds``, ``mode`` and ``deterministic``; in frames mode also
        ``frame_index`` (from 1), ``total_frames_extracted`` and ``source_frame_index``.
        """
        sample, path = _planned(metadata, "video_path", num_frames=metadata["num_frames"])
        fields = dict(text_encodings)
        if metadata.get("image_embeds") is not None:
            fields["image_embeds"] = metadata["image_embeds"]
        return video_data(
            sample,
            (latent[0] if latent.ndim == 5 else latent).cpu(),
            fields,
            _pair(metadata, "crop_offset", (0, 0)),
            path,
            self.info,
            mode=metadata.get("mode", "video"),
            deterministic=metadata.get("deterministic", True),
            first_frame=metadata.get("first_frame"),
            source_frame=metadata.get("source_frame_index"),
        )


class WanProcessor(_VideoAdapter):
    """Wan 2.1."""

    name = "wan"


class Wan22Processor(_VideoAdapter):
    """Wan 2.2."""

    name = "wan2.2"


class HunyuanVideoProcessor(_VideoAdapter):
    """HunyuanVideo 1.5."""

    name = "hunyuan"


def _loaded(models: Models) -> Processor:
    try:
        found: Processor = models["processor"]
    except (KeyError, TypeError):
        raise ConfigError("models is not what load_models returned") from None
    return found


def _as_pixels(batch: torch.Tensor) -> torch.Tensor:
    """uint8 pixels; floating-point ones in -1 … 1 are scaled back, which is exact if they were made of uint8."""
    if batch.dtype == torch.uint8:
        return batch
    if not batch.is_floating_point():
        raise ConfigError(f"pixels are {batch.dtype}; they must be uint8, or floating point in -1 to 1")
    return ((batch.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _planned(
    metadata: Mapping[str, Any], path_key: str, num_frames: int | None
) -> tuple[PlannedSample, Path]:
    """The sample that the metadata describes, and its path."""
    width, height = _pair(metadata, "original_resolution")
    path = Path(metadata[path_key])
    sample = PlannedSample(
        SourceFile(path.name, 0, 0),
        Caption(metadata["prompt"], ""),
        width=width,
        height=height,
        bucket_id=metadata.get("bucket_id"),
        bucket=Bucket(*_pair(metadata, "bucket_resolution"), num_frames),
        number=metadata.get("frame_index", 1) - 1,
        num_samples=metadata.get("total_frames_extracted", 1),
    )
    return sample, path


def _pair(metadata: Mapping[str, Any], key: str, default: tuple[int, int] | None = None) -> tuple[int, int]:
    first, second = metadata[key] if default is None else metadata.get(key, default)
    return int(first), int(second)
