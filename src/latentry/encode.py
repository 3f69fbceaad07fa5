"""One task: decode, batch, encode, write. A bounded, overlapped pipeline.

Threads decode and cut pictures some batches ahead, the calling thread runs the model, other threads
serialise and write what it has finished. At no time are more than a few batches in memory. A picture that
fails is noted and the others go on; which pictures share a batch depends on the task alone.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latentry.cache.writer import cache_file_bytes, write_cache_file
from latentry.errors import MediaError, RunError
from latentry.media.images import decode_image, fit_to_bucket
from latentry.order import derived_key
from latentry.plan import ResolvedRecipe, content_digest
from latentry.processors import Fields, Processor
from latentry.records import Commit, Failure, PlannedSample, Task

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
    pixels: torch.Tensor
    offset: tuple[int, int]
    digest: str


class _Texts:
    """The distinct captions of a task, each encoded once, in batches, as they are reached."""

    def __init__(self, processor: Processor, samples: Sequence[PlannedSample]) -> None:
        self._processor = processor
        self._waiting = list(dict.fromkeys(sample.caption.text for sample in samples))
        self._encoded: dict[str, Fields] = {}

    def fields(self, caption: str) -> Fields:
        while caption not in self._encoded:
            batch, self._waiting = self._waiting[:TEXT_BATCH_SIZE], self._waiting[TEXT_BATCH_SIZE:]
            self._encoded.update(zip(batch, self._processor.encode_texts(batch), strict=True))
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
        verify: bool = False,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        self._processor = processor
        self._recipe = recipe
        self._fingerprint = recipe.fingerprint
        self._source = source
        self._output = output
        self._batch_size = batch_size
        self._num_threads = num_threads
        self._verify = verify
        self._on_outcome = on_outcome
        self._failures_in_a_row = 0

    def run(self, task: Task) -> Commit:
        """Encode and write the task's samples; what is returned is still to be committed."""
        rows: list[dict[str, object]] = []
        failures: list[Failure] = []
        writing: deque[Future[dict[str, object]]] = deque()
        with ThreadPoolExecutor(self._num_threads) as readers, ThreadPoolExecutor(2) as writers:
            try:
                texts = _Texts(self._processor, task.samples)
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
        """Decoded pictures in groups of the batch size, read ahead but not too far."""
        ahead = 2 * self._batch_size + self._num_threads
        waiting = deque(readers.submit(self._decode, sample) for sample in samples[:ahead])
        rest = iter(samples[ahead:])
        batch: list[_Decoded] = []
        for sample in samples:
            result = waiting.popleft().result()
            if (following := next(rest, None)) is not None:
                waiting.append(readers.submit(self._decode, following))
            if isinstance(result, str):
                self._fail(sample, result, failures)
                continue
            self._failures_in_a_row = 0
            batch.append(result)
            if len(batch) == self._batch_size:
                yield batch
                batch = []
        if batch:
            yield batch

    def _decode(self, sample: PlannedSample) -> _Decoded | str:
        try:
            content = (self._source / sample.file.name).read_bytes()
            pixels = decode_image(content)
            seed = derived_key(self._recipe.seed, "crop", sample.file.name)
            window, offset = fit_to_bucket(pixels, sample.bucket, self._recipe.crop_mode, seed)
            if (pixels.shape[1], pixels.shape[0]) != (sample.width, sample.height):
                return f"is {pixels.shape[1]}x{pixels.shape[0]}, but was {sample.width}x{sample.height} when planned"
            return _Decoded(sample, window, offset, content_digest(content))
        except MediaError as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror}"

    def _fail(self, sample: PlannedSample, reason: str, failures: list[Failure]) -> None:
        failures.append(Failure(sample.file.name, reason))
        self._on_outcome(Outcome(sample.file.name, failure=reason))
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise RunError(
                f"{MAX_FAILURES_IN_A_ROW} inputs in a row failed, the last one {sample.file.name}: {reason}; "
                "what is committed is kept, and the same command goes on once the cause is mended"
            )

    # ---- encode -----------------------------------------------------------------------------

    def _encode_batch(
        self, batch: list[_Decoded], texts: _Texts, failures: list[Failure]
    ) -> Iterator[tuple[dict[str, Any], _Decoded]]:
        pixels = torch.stack([decoded.pixels for decoded in batch])
        seeds = None
        if self._recipe.stochastic:
            seeds = [derived_key(self._recipe.seed, "latent", d.sample.file.name, d.digest) for d in batch]
        latents = self._processor.encode_images(pixels, seeds).cpu()
        psnrs: list[float | None] = [None] * len(batch)
        if self._verify:
            restored = self._processor.decode_images(latents)
            psnrs = [psnr_db(*pair) for pair in zip(pixels, restored, strict=True)]
        for decoded, latent, psnr in zip(batch, latents, psnrs, strict=True):
            problem = latent_problem(latent)
            if problem:
                self._fail(decoded.sample, problem, failures)
                continue
            self._on_outcome(Outcome(decoded.sample.file.name, psnr_db=psnr))
            yield self._cache_data(decoded, latent, texts.fields(decoded.sample.caption.text)), decoded

    def _cache_data(self, decoded: _Decoded, latent: torch.Tensor, text: Fields) -> dict[str, Any]:
        sample = decoded.sample
        return {
            "latent": latent,
            **text,
            "original_resolution": (sample.width, sample.height),
            "bucket_resolution": sample.bucket,
            "crop_offset": decoded.offset,
            "prompt": sample.caption.text,
            "image_path": str(self._source / sample.file.name),
            "bucket_id": sample.bucket_id,
            "aspect_ratio": sample.bucket[0] / sample.bucket[1],
            "model_type": self._processor.info.model_type,
        }

    # ---- write ------------------------------------------------------------------------------

    def _write(self, data: dict[str, Any], decoded: _Decoded) -> dict[str, object]:
        sample = decoded.sample
        identity = "\n".join([sample.file.name, decoded.digest, sample.caption.text, self._fingerprint])
        name = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        width, height = sample.bucket
        path = self._output / f"{width}x{height}" / f"{name}.{self._recipe.output_format}"
        try:
            write_cache_file(path, cache_file_bytes(data, self._recipe.output_format))
        except OSError as error:
            raise RunError(
                f"{path} cannot be written: {error.strerror}; what is committed is kept, and the same command goes on"
            ) from None
        return {
            "cache_file": os.fspath(path),
            "image_path": data["image_path"],
            "bucket_resolution": list(sample.bucket),
            "original_resolution": [sample.width, sample.height],
            "prompt": sample.caption.text,
            "bucket_id": sample.bucket_id,
            "aspect_ratio": data["aspect_ratio"],
            "pixels": width * height,
            "model_type": data["model_type"],
            "caption_source": sample.caption.source,
            "source_name": sample.file.name,
            "source_bytes": sample.file.size_bytes,
            "source_modified_ns": sample.file.modified_ns,
            "source_digest": decoded.digest,
        }


def latent_problem(latent: torch.Tensor) -> str | None:
    """Why no one should train on this latent, if so."""
    values = latent.float()
    if not torch.isfinite(values).all():
        return "its latent holds NaN or infinite values; try --dtype float32"
    if values.numel() > 1 and values.min() == values.max():
        return f"its latent is constant ({values.flatten()[0].item():g} everywhere)"
    return None


def psnr_db(original: torch.Tensor, restored: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of two uint8 pictures, in decibels; 99 at most."""
    error = (original.float() - restored.float()).square().mean().item()
    return min(99.0, 10 * math.log10(255**2 / error)) if error > 0 else 99.0
