"""Encoding one batch on the device, without waiting for it.

Results are copied to pinned memory while the device works on the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from latentry.cache.latent_checks import latent_flags, psnr_db
from latentry.encode.resolved_recipe import ResolvedRecipe
from latentry.encode.running.caption_batches import CaptionPasses, EncodedCaption
from latentry.encode.running.device import to_host
from latentry.encode.running.memory import WithinMemory
from latentry.encode.running.read_ahead import DecodedSample
from latentry.encode.running.running_task import RunningTask
from latentry.processors import Processor, StackedFields
from latentry.seeds import derived_seed
from latentry.types import Bucket

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
        self,
        processor: Processor,
        recipe: ResolvedRecipe,
        device: torch.device,
        *,
        verify: bool,
        max_samples_ahead: int,
    ) -> None:
        self._processor = processor
        self._recipe = recipe
        self._device = device
        self._verify = verify
        self._memory = WithinMemory(processor, device)
        self.caption_passes = CaptionPasses(processor, self._memory, max_samples_ahead)
        """Encodes the captions."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device works on while this process does something else. Only CUDA is used like that."""
        return self._device.type == "cuda"

    def batch_size(self, bucket: Bucket) -> int:
        """The default batch size of a bucket.

        On a CPU it is 1: batching gains nothing, and a latent that is encoded alone equals the pipeline's. For clips
        it is 1 too: one clip keeps any device busy. For images on a GPU it is a power of two that uses the GPU well
        and fits into its memory.
        """
        width, height, num_frames = bucket
        if self._device.type == "cpu" or (num_frames or 1) > 1:
            return 1
        most = min(_MAX_BATCH_SIZE, max(1, _BATCH_PIXELS // (width * height)))
        shape = (3, height, width) if num_frames is None else (3, num_frames, height, width)
        fitting = self._processor.max_batch_size(shape, most)
        return 1 << (fitting.bit_length() - 1)

    def queue(self, running: RunningTask, batch: Sequence[DecodedSample]) -> QueuedBatch:
        """Queue the encoding of a batch on the device; do not wait for it."""
        if batch[0].stored is not None:
            return self._queue_captions(running, batch)
        crops = [decoded.crop.pixels for decoded in batch]
        pixels = torch.empty(
            (len(crops), *crops[0].shape), dtype=torch.uint8, pin_memory=self.is_asynchronous
        )
        torch.stack(crops, out=pixels)
        captions = self._captions(running, batch)
        on_device = self._memory.attempt(lambda: pixels.to(self._device, non_blocking=self.is_asynchronous))
        seeds = self._seeds(batch)
        latents = self._memory.call(
            lambda part: {
                "latents": self._processor.encode_pixels(
                    on_device[part.start : part.stop], seeds and seeds[part.start : part.stop]
                )
            },
            range(len(batch)),
        )["latents"]
        extras: StackedFields = {}
        if self._recipe.video is None or self._recipe.video.mode == "video":
            extras = self._memory.call(self._processor.media_fields, pixels)
        psnr: list[float | None] = [None] * len(batch)
        if self._verify:
            restored = self._memory.call(
                lambda part: {"pixels": self._processor.decode_latents(part)}, latents
            )["pixels"]
            psnr = [psnr_db(*pair) for pair in zip(on_device, restored, strict=True)]
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
        take = self.caption_passes.take
        return [[take(running.captions, text) for text in d.sample.caption.texts] for d in batch]

    def _event(self) -> torch.cuda.Event | None:
        """An event after everything that is queued; None where nothing is."""
        if not self.is_asynchronous:
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seeds(self, batch: Sequence[DecodedSample]) -> list[int] | None:
        """The seeds with which latents are drawn, if they are."""
        if not self._recipe.stochastic:
            return None
        return [derived_seed(self._recipe.seed, "latent", d.sample.name, d.digest) for d in batch]
