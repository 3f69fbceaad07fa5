"""Decoding the latents of a cache, to compare them with the images and videos they were made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from latentry.cache.format import CacheMetadata, Row
from latentry.cache.latent_checks import psnr_db
from latentry.encode.planning.held_samples import planned_sample
from latentry.encode.resolved_recipe import ResolvedRecipe
from latentry.encode.running.memory import WithinMemory, load_within_memory
from latentry.errors import ConfigError, MediaError
from latentry.hardware import as_current_device, available_memory, find_devices
from latentry.processors import Processor, processor_class
from latentry.seeds import derived_seed
from latentry.types import Caption, SourceFile


class DecodeCheck:
    """Decodes latents with the cache's own model, and reads their inputs as its recipe did."""

    def __init__(self, cache_dir: Path, metadata: CacheMetadata, device: str) -> None:
        if metadata.recipe is None or metadata.model_name is None:
            raise ConfigError(
                f"{cache_dir} was made by another tool and records no recipe; leave out --decode"
            )
        self._recipe = ResolvedRecipe.from_recorded(metadata.recipe)
        self._reader = self._recipe.media_reader()
        self._model_name = metadata.model_name
        self._device = find_devices(device)[0]
        found = torch.device(self._device)
        with as_current_device(self._device):
            self._processor = load_within_memory(self._load, available_memory(found), found)
        self._memory = WithinMemory(self._processor, found)

    def _load(self, budget: float) -> Processor:
        return processor_class(self._recipe.processor)(
            self._model_name,
            torch.device(self._device),
            getattr(torch, self._recipe.dtype),
            text_dtype=self._recipe.text_dtype,
            device_memory=budget,
        )

    def psnr_db(self, row: Row, data: Mapping[str, Any]) -> float:
        """How close a sample's decoded latent is to its input, in decibels."""
        file = self._reader.load(Path(row.media_path or ""))
        if file.digest != row.source_digest:
            raise MediaError("has changed since it was encoded; rerun the same command to encode it again")
        latents = data["latent"][None] if "latent" in data else data["video_latents"]
        with as_current_device(self._device):
            decoded = self._memory.call(
                lambda part: {"pixels": self._processor.decode_latents(part)}, latents
            )["pixels"][0]
        seed = derived_seed(self._recipe.seed, "crop", row.source_name)
        source = SourceFile(row.source_name, row.source_bytes or 0, row.source_modified_ns or 0)
        sample = planned_sample(row, source, Caption(row.prompt or "", row.caption_source))
        (crop,) = self._reader.read(file, [sample], seed)
        if isinstance(crop, str):
            raise MediaError(crop)
        return psnr_db(crop.pixels, decoded)
