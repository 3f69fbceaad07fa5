"""One task: decode, batch, encode, write. A bounded, overlapped pipeline, the same for pictures and clips.

Threads decode and cut samples some batches ahead, the calling thread runs the model, other threads
serialise and write what it has finished. At no time are more than a few batches in memory. A sample that
fails is noted and the others go on; which samples share a batch depends on the task alone.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from latentry.cache.layout import image_file, metadata_row, video_file
from latentry.cache.writer import cache_file_bytes, write_cache_file
from latentry.errors import MediaError, RunError
from latentry.media.kinds import Cut
from latentry.order import derived_key
from latentry.plan import ResolvedRecipe
from latentry.processors import Fields, Processor
from latentry.records import Commit, Failure, PlannedSample, Task
from latentry.storage import content_digest

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 100
"""So many bad files one after the other mean that something is wrong with more than the files."""
TEXT_BATCH_SIZE = 64
"""Captions that are encoded together."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sample, for whoever watches."""

    name: str
    failure: str | None = None
    psnr_db: float | None = None


@dataclass(frozen=True, slots=True)
class _Decoded:
    sample: PlannedSample
    cut: Cut
    digest: str


def free_bytes(device: str) -> float:
    """What can still be allocated on a GPU; of a CPU's memory nothing is said."""
    if not device.startswith("cuda"):
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def in_halves(call: Callable[[Any], Any], batch: Any) -> list[Any]:
    """``list(call(batch))``; where the device's memory is too small for that, of its halves."""
    try:
        return list(call(batch))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        if len(batch) == 1:
            raise RunError(
                "the device's memory is too small for a single sample; use a larger device"
            ) from None
        half = len(batch) // 2
        return in_halves(call, batch[:half]) + in_halves(call, batch[half:])


class _Texts:
    """The distinct captions of a task, each encoded once, in batches, as they are reached."""

    def __init__(self, processor: Processor, samples: Sequence[PlannedSample]) -> None:
        self._processor = processor
        self._waiting = list(dict.fromkeys(sample.caption.text for sample in samples))
        self._encoded: dict[str, Fields] = {}

    def fields(self, caption: str) -> Fields:
        while caption not in self._encoded:
            batch, self._waiting = self._waiting[:TEXT_BATCH_SIZE], self._waiting[TEXT_BATCH_SIZE:]
            self._encoded.update(zip(batch, in_halves(self._processor.encode_texts, batch), strict=True))
        return self._encoded[caption]


class TaskRunner:
    """Runs tasks with one loaded model, on one device."""

    def __init__(
        self,
        processor: Processor,
        recipe: ResolvedRecipe,
        source: Path,
        output: Path,
        *,
        batch_size: int,
        num_threads: int,
        device: str = "cpu",
        verify: bool = False,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        self._processor = processor
        self._recipe = recipe
        self._medium = recipe.medium()
        self._fingerprint = recipe.fingerprint
        self._source = source
        self._output = output
        self._batch_size = batch_size
        self._num_threads = num_threads
        self._device = device
        self._tiled = False
        self._verify = verify
        self._on_outcome = on_outcome
        self._failures_in_a_row = 0
        self._counts_failures = True

    def run(self, task: Task) -> Commit:
        """Encode and write the task's samples; what is returned is still to be committed."""
        rows: list[dict[str, object]] = []
        failures: list[Failure] = []
        writing: deque[Future[dict[str, object]]] = deque()
        with ThreadPoolExecutor(self._num_threads) as readers, ThreadPoolExecutor(2) as writers:
            try:
                texts = _Texts(self._processor, task.samples)
                self._counts_failures = not task.retry
                for batch in self._batches(task.samples, readers, failures):
                    for data, sample in self._encode_batch(batch, texts, failures):
                        writing.append(writers.submit(self._write, data, sample))
                    while len(writing) > 2 * self._batch_size:
                        rows.append(writing.popleft().result())
                rows.extend(future.result() for future in writing)
            except BaseException:
                readers.shutdown(wait=False, cancel_futures=True)
                writers.shutdown(wait=False, cancel_futures=True)
                raise
        return Commit(task.id, tuple(rows), tuple(failures))

    # ---- decode -----------------------------------------------------------------------------

    def _batches(
        self, samples: Sequence[PlannedSample], readers: ThreadPoolExecutor, failures: list[Failure]
    ) -> Iterator[list[_Decoded]]:
        """Decoded samples in groups of the batch size, read ahead but not too far."""
        files = [tuple(group) for _, group in groupby(samples, key=lambda sample: sample.file)]
        ahead = 2 * self._batch_size + self._num_threads
        waiting = deque(readers.submit(self._decode, group) for group in files[:ahead])
        rest = iter(files[ahead:])
        batch: list[_Decoded] = []
        for group in files:
            result = waiting.popleft().result()
            if (following := next(rest, None)) is not None:
                waiting.append(readers.submit(self._decode, following))
            if isinstance(result, str):
                for sample in group:
                    self._fail(sample, result, failures)
                self._count_bad_file(group[0].file.name, result)
                continue
            self._failures_in_a_row = 0
            for decoded in result:
                batch.append(decoded)
                if len(batch) == self._batch_size:
                    yield batch
                    batch = []
        if batch:
            yield batch

    def _decode(self, group: Sequence[PlannedSample]) -> list[_Decoded] | str:
        """The samples of one file, or the reason why there are none."""
        file = group[0].file
        path = self._source / file.name
        try:
            digest = content_digest(path)
            cuts = self._medium.read(path, group, derived_key(self._recipe.seed, "crop", file.name))
            return [_Decoded(sample, cut, digest) for sample, cut in zip(group, cuts, strict=True)]
        except MediaError as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror}"

    def _fail(self, sample: PlannedSample, reason: str, failures: list[Failure]) -> None:
        failures.append(Failure(sample.name, reason))
        self._on_outcome(Outcome(sample.name, failure=reason))

    def _count_bad_file(self, name: str, reason: str) -> None:
        self._failures_in_a_row += self._counts_failures
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise RunError(
                f"{MAX_FAILURES_IN_A_ROW} inputs in a row failed, the last one {name}: {reason}; what is "
                "committed is kept, and the same command goes on once the cause is mended"
            )

    # ---- encode -----------------------------------------------------------------------------

    def _encode_batch(
        self, batch: list[_Decoded], texts: _Texts, failures: list[Failure]
    ) -> Iterator[tuple[dict[str, Any], _Decoded]]:
        pixels = torch.stack([decoded.cut.pixels for decoded in batch])
        latents = self._encode_pixels(batch, pixels)
        extras: Sequence[Fields] = [{}] * len(batch)
        if self._recipe.video is None or self._recipe.video.mode == "video":
            extras = in_halves(self._processor.media_fields, pixels)
        psnrs: list[float | None] = [None] * len(batch)
        if self._verify:
            restored = in_halves(self._processor.decode_latents, latents)
            psnrs = [psnr_db(*pair) for pair in zip(pixels, restored, strict=True)]
        for decoded, latent, extra, psnr in zip(batch, latents, extras, psnrs, strict=True):
            problem = latent_problem(latent)
            if problem:
                self._fail(decoded.sample, problem, failures)
                continue
            self._on_outcome(Outcome(decoded.sample.name, psnr_db=psnr))
            fields = {**texts.fields(decoded.sample.caption.text), **extra}
            yield self._cache_data(decoded, latent, fields), decoded

    def _encode_pixels(self, batch: Sequence[_Decoded], pixels: torch.Tensor) -> torch.Tensor:
        """Latents; where the device's memory is too small, in halves, and at last in tiles."""
        seeds = None
        if self._recipe.stochastic:
            seeds = [derived_key(self._recipe.seed, "latent", d.sample.name, d.digest) for d in batch]
        try:
            if not self._fits(pixels):
                raise torch.OutOfMemoryError
            return self._processor.encode_pixels(pixels, seeds).cpu()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if len(batch) > 1:
                half = len(batch) // 2
                parts = (
                    self._encode_pixels(batch[part], pixels[part])
                    for part in (slice(half), slice(half, None))
                )
                return torch.cat(list(parts))
            self._tiled = True
            if not self._processor.enable_tiling():
                raise RunError(
                    f"the device's memory is too small for {batch[0].sample.name}; take a smaller resolution or fewer frames"
                ) from None
            logger.warning(
                "the device's memory is too small to encode whole samples: going on in tiles, more slowly"
            )
            return self._encode_pixels(batch, pixels)

    def _fits(self, pixels: torch.Tensor) -> bool:
        """Whether encoding these whole is known to take no more memory than the device has free."""
        num_pixels = pixels.numel() // pixels.shape[1]
        size = getattr(torch, self._recipe.dtype).itemsize / 2
        need = self._processor.info.encode_bytes_per_pixel * num_pixels * size
        return self._tiled or need == 0 or need <= free_bytes(self._device)

    def _cache_data(self, decoded: _Decoded, latent: torch.Tensor, fields: Fields) -> dict[str, Any]:
        sample, cut = decoded.sample, decoded.cut
        path = self._source / sample.file.name
        if self._recipe.video is None:
            return image_file(sample, latent, fields, cut.offset, path, self._processor.info)
        return video_file(
            sample,
            latent,
            fields,
            cut.offset,
            path,
            self._processor.info,
            mode=self._recipe.video.mode,
            deterministic=not self._recipe.stochastic,
            first_frame=cut.pixels[:, 0].permute(1, 2, 0),
            source_frame=cut.source_frame,
        )

    # ---- write ------------------------------------------------------------------------------

    def _write(self, data: dict[str, Any], decoded: _Decoded) -> dict[str, object]:
        sample = decoded.sample
        identity = "\n".join([sample.name, decoded.digest, sample.caption.text, self._fingerprint])
        name = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        width, height = sample.bucket
        path = self._output / f"{width}x{height}" / f"{name}.{self._recipe.output_format}"
        content = cache_file_bytes(data, self._recipe.output_format)
        try:
            write_cache_file(path, content)
        except OSError as error:
            raise RunError(
                f"{path} cannot be written: {error.strerror}; what is committed is kept, and the same command goes on"
            ) from None
        return metadata_row(sample, data, path, decoded.digest, content_digest(path))


def latent_problem(latent: torch.Tensor) -> str | None:
    """Why no one should train on this latent, if so."""
    values = latent.float()
    if not torch.isfinite(values).all():
        return "its latent holds NaN or infinite values; try --dtype float32"
    if values.numel() > 1 and values.min() == values.max():
        return f"its latent is constant ({values.flatten()[0].item():g} everywhere)"
    return None


def psnr_db(original: torch.Tensor, restored: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of two uint8 pictures or clips, in decibels; 99 at most."""
    error = (original.float() - restored.float()).square().mean().item()
    return min(99.0, 10 * math.log10(255**2 / error)) if error > 0 else 99.0
