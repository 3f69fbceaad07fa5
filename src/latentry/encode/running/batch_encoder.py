"""Encoding one batch on the device, without waiting for it.

Results are copied to pinned memory while the device works on the next batch. Where the device's memory is too small
for a batch, its halves are encoded, and finally single samples in tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from latentry.cache.latent_checks import latent_flags, psnr_db
from latentry.encode.recipe import ResolvedRecipe
from latentry.encode.running.caption_batches import CaptionBatches, EncodedCaption
from latentry.encode.running.device import to_host, with_smaller_batches_on_oom
from latentry.encode.running.read_ahead import DecodedSample
from latentry.encode.running.running_task import RunningTask
from latentry.errors import RunError
from latentry.hardware import free_bytes, share_of_memory
from latentry.processors import Processor, StackedFields
from latentry.seeds import derived_seed
from latentry.types import Bucket, Task

logger = logging.getLogger(__name__)

_BATCH_PIXELS = 16 << 20
_MAX_BATCH_SIZE = 64


@dataclass(frozen=True, slots=True)
class QueuedBatch:
    """A batch that the device may still be working on."""

    running: RunningTask
    samples: Sequence[DecodedSample]
    latents: torch.Tensor
    flags: torch.Tensor
    """For each latent, whether it is not finite and whether it is constant."""
    extras: StackedFields
    captions: Sequence[Sequence[EncodedCaption]]
    """All captions of each sample."""
    psnr_db: Sequence[float | None]
    ready: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until the results are in main memory."""
        if self.ready is not None:
            self.ready.synchronize()


class BatchEncoder:
    """Encodes batches with one loaded model on one device."""

    def __init__(
        self, processor: Processor, recipe: ResolvedRecipe, device: torch.device, *, verify: bool
    ) -> None:
        self._processor = processor
        self._recipe = recipe
        self._device = device
        self._verify = verify
        self._tiled = False

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def batch_size(self, bucket: Bucket) -> int:
        """The default batch size of a bucket.

        On a CPU it is 1: batching gains nothing, and a latent that is encoded alone equals the pipeline's. For clips
        it is 1 too: one clip keeps any device busy. For images on a GPU it is a power of two that uses the GPU well
        and fits into a share of its memory.
        """
        width, height, num_frames = bucket
        if self._device.type == "cpu" or (num_frames or 1) > 1:
            return 1
        limit = min(_MAX_BATCH_SIZE, max(1, _BATCH_PIXELS // (width * height)))
        shape = (1, 3, height, width) if num_frames is None else (1, 3, num_frames, height, width)
        needed = self._processor.bytes_needed(torch.empty(shape, device="meta"))
        if needed:
            limit = min(limit, max(1, int(share_of_memory(self._device)) // needed))
        return 1 << (limit.bit_length() - 1)

    def caption_batches(self, task: Task) -> CaptionBatches:
        """The encoded captions of a task's samples."""
        return CaptionBatches(self._processor, task.samples, task.num_finished)

    def queue(self, running: RunningTask, batch: Sequence[DecodedSample]) -> QueuedBatch:
        """Queue the encoding of a batch on the device; do not wait for it."""
        if batch[0].stored is not None:
            return self._queue_captions(running, batch)
        crops = [decoded.crop.pixels for decoded in batch]
        pixels = torch.empty((len(crops), *crops[0].shape), dtype=torch.uint8, pin_memory=self.on_gpu)
        torch.stack(crops, out=pixels)
        captions = self._captions(running, batch)
        on_device = pixels.to(self._device, non_blocking=True)
        latents = self._encode(batch, on_device)
        extras: StackedFields = {}
        if self._recipe.video is None or self._recipe.video.mode == "video":
            extras = with_smaller_batches_on_oom(self._processor.media_fields, pixels)
        psnr: list[float | None] = [None] * len(batch)
        if self._verify:
            decoded_again = with_smaller_batches_on_oom(
                lambda part: {"pixels": self._processor.decode_latents(part)}, latents
            )
            psnr = [psnr_db(*pair) for pair in zip(on_device, decoded_again["pixels"], strict=True)]
        flags = to_host(latent_flags(latents))
        latents = to_host(latents)
        extras = {key: to_host(column) for key, column in extras.items()}
        return QueuedBatch(running, batch, latents, flags, extras, captions, psnr, self._event())

    def _queue_captions(self, running: RunningTask, batch: Sequence[DecodedSample]) -> QueuedBatch:
        """Queue the encoding of captions. Everything else is what the cache holds."""
        captions = self._captions(running, batch)
        stored = [decoded.stored for decoded in batch if decoded.stored is not None]
        latents = torch.stack([tensors.latent for tensors in stored])
        psnr = [None] * len(batch)
        return QueuedBatch(running, batch, latents, latent_flags(latents), {}, captions, psnr, self._event())

    def _captions(self, running: RunningTask, batch: Sequence[DecodedSample]) -> list[list[EncodedCaption]]:
        return [[running.captions.take(text) for text in d.sample.caption.texts] for d in batch]

    def _event(self) -> torch.cuda.Event | None:
        """An event after everything that is queued; None on a CPU, where nothing is."""
        if not self.on_gpu:
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _encode(self, batch: Sequence[DecodedSample], pixels: torch.Tensor) -> torch.Tensor:
        """Latents; in halves, and finally in tiles, where the device's memory is too small."""
        seeds = None
        if self._recipe.stochastic:
            seeds = [derived_seed(self._recipe.seed, "latent", d.sample.name, d.digest) for d in batch]
        if self._tiled or self._processor.bytes_needed(pixels) <= free_bytes(self._device):
            # Leaving the block releases the memory of the failed attempt.
            with suppress(torch.OutOfMemoryError):
                return self._processor.encode_pixels(pixels, seeds)
        torch.cuda.empty_cache()
        if len(batch) > 1:
            half = len(batch) // 2
            parts = (self._encode(batch[part], pixels[part]) for part in (slice(half), slice(half, None)))
            return torch.cat(list(parts))
        self._tiled = True
        if not self._processor.enable_tiling():
            raise RunError(
                f"the device's memory is too small for {batch[0].sample.name}; use a smaller resolution or fewer "
                "frames"
            )
        logger.warning(
            "the device's memory is too small for whole samples; encoding in tiles, which is slower"
        )
        return self._encode(batch, pixels)
