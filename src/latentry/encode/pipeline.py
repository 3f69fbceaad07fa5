"""Tasks: decode, batch, encode, write. A bounded, overlapped pipeline, the same for pictures and clips.

Threads decode and cut samples some batches ahead, the calling thread feeds the device, other threads
serialise and write what it has finished. The device is never waited for except for the batch before the last:
while one batch is computed the next is already queued, and results come back through page-locked memory. The
pipeline goes on from one task to the next without a pause. At no time are more than a few batches in memory.
A sample that fails is noted and the others go on; which samples share a batch depends on the task alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from latentry.cache.checks import latent_flags, problem_of_flags, psnr_db
from latentry.cache.write.sample_data import image_file, metadata_row, video_file
from latentry.cache.write.writers import TaskWriter, Threads, task_writer
from latentry.encode.caption_batches import CaptionBatches, Text
from latentry.encode.device import feeding_a_gpu, in_halves, single_threads, to_host
from latentry.encode.recipe import ResolvedRecipe
from latentry.errors import MediaError, RunError
from latentry.hardware import free_bytes, share_of_memory
from latentry.media.reader import Crop
from latentry.processors import Columns, Fields, Processor
from latentry.seeds import derived_seed
from latentry.types import Bucket, Commit, Failure, PlannedSample, Task

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 100
"""So many bad files one after the other mean that something is wrong with more than the files."""
_BATCHES_QUEUED = 2
"""On a GPU; a CPU has finished a batch when the call returns."""
_TASKS_CLOSING = 2
"""Tasks that are encoded and still being written while a GPU is at the next."""
_WRITER_THREADS = 16
_BATCH_PIXELS = 16 << 20
_MOST_IN_BATCH = 64
_BYTES_AHEAD = 1 << 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sample, for whoever watches."""

    name: str
    failure: str | None = None
    psnr_db: float | None = None


@dataclass(frozen=True, slots=True)
class _Decoded:
    sample: PlannedSample
    cut: Crop
    digest: str


@dataclass
class _Running:
    """A task under way."""

    task: Task
    writer: TaskWriter
    texts: CaptionBatches
    batch_size: int
    failures: list[Failure] = field(default_factory=list)

    def commit(self) -> Commit:
        return Commit(self.task.id, tuple(self.writer.rows()), tuple(self.failures))


@dataclass(frozen=True, slots=True)
class _Queued:
    """A batch that the device is still at work on; ``samples`` is None for the end of a task."""

    running: _Running
    samples: Sequence[_Decoded] | None
    latents: torch.Tensor
    problems: torch.Tensor
    extras: Columns
    texts: Sequence[Text]
    psnrs: Sequence[float | None]
    ready: torch.cuda.Event | None


def _is_due(queued: Sequence[_Queued], most: int) -> bool:
    """Whether the first is to be waited for, so that no more than so many batches are left to the device.

    The end of a task is nothing to a device: if it counted, the device would run dry at each.
    """
    num_batches = sum(entry.samples is not None for entry in queued)
    return bool(queued) and (queued[0].samples is None or num_batches > most)


class TaskRunner:
    """Runs tasks with one loaded model, on one device."""

    def __init__(
        self,
        processor: Processor,
        recipe: ResolvedRecipe,
        source: Path,
        output: Path,
        *,
        batch_size: int | None,
        num_threads: int,
        device: str = "cpu",
        verify: bool = False,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        self._processor = processor
        self._recipe = recipe
        self._medium = recipe.media_reader()
        self._fingerprint = recipe.fingerprint
        self._source = source
        self._output = output
        self._batch_size = batch_size
        self._num_threads = num_threads
        self._device = torch.device(device)
        self._tiled = False
        self._verify = verify
        self._on_outcome = on_outcome
        self._failures_in_a_row = 0

    def run(self, tasks: Iterable[Task]) -> Iterator[Commit]:
        """Encode and write the tasks' samples; what comes out is on disk, and still to be committed."""
        queued: deque[_Queued] = deque()
        closing: deque[_Running] = deque()
        on_gpu = self._device.type == "cuda"
        with (
            feeding_a_gpu() if on_gpu else nullcontext(),
            single_threads(self._num_threads) as readers,
            Threads.running(_WRITER_THREADS) as writers,
        ):
            try:
                for running, batch in self._batches(tasks, readers, writers):
                    queued.append(self._queue(running, batch))
                    while _is_due(queued, _BATCHES_QUEUED if on_gpu else 0):
                        self._land(queued.popleft(), closing)
                    while closing and (
                        closing[0].writer.done() or len(closing) > (_TASKS_CLOSING if on_gpu else 0)
                    ):
                        yield closing.popleft().commit()
                while queued:
                    self._land(queued.popleft(), closing)
                while closing:
                    yield closing.popleft().commit()
            except BaseException:
                readers.shutdown(wait=False, cancel_futures=True)
                raise

    # ---- decode -----------------------------------------------------------------------------

    def _begin(self, task: Task, writers: Threads) -> _Running:
        stem = hashlib.blake2b(f"{task.id} {self._fingerprint}".encode(), digest_size=16).hexdigest()
        writer = task_writer(self._output, self._recipe.output_format, task.bucket[:2], stem, writers)
        return _Running(
            task, writer, CaptionBatches(self._processor, task.samples), self._samples_per_batch(task.bucket)
        )

    def _samples_per_batch(self, bucket: Bucket) -> int:
        """As asked for; else one on a CPU, where batching gains nothing and a latent alone is its pipeline's.

        One for clips, too, which keep any device busy. Pictures are so many that a GPU is used well, a power of
        two, and no more than a share of its memory is known to hold.
        """
        if self._batch_size is not None:
            return self._batch_size
        width, height, num_frames = bucket
        if self._device.type == "cpu" or (num_frames or 1) > 1:
            return 1
        most = min(_MOST_IN_BATCH, max(1, _BATCH_PIXELS // (width * height)))
        shape = (1, 3, height, width) if num_frames is None else (1, 3, num_frames, height, width)
        need = self._processor.bytes_needed(torch.empty(shape, device="meta"))
        if need:
            most = min(most, max(1, int(share_of_memory(self._device)) // need))
        return 1 << (most.bit_length() - 1)

    def _batches(
        self, tasks: Iterable[Task], readers: ThreadPoolExecutor, writers: Threads
    ) -> Iterator[tuple[_Running, list[_Decoded] | None]]:
        """Decoded samples in groups of the batch size, read ahead but not too far; None ends a task."""
        source = self._files(tasks, readers, writers)
        ahead: deque[_Reading] = deque()
        num_ahead = num_received = 0
        batch: list[_Decoded] = []
        exhausted = False
        while True:
            while not exhausted and (
                not ahead or num_ahead < self._most_ahead(ahead[0].running, num_received)
            ):
                reading = next(source, None)
                if reading is None:
                    exhausted = True
                else:
                    ahead.append(reading)
                    num_ahead += len(reading.samples)
            if not ahead:
                return
            reading = ahead.popleft()
            running = reading.running
            num_ahead -= len(reading.samples)
            if reading.future is None:
                if batch:
                    yield running, batch
                    batch = []
                yield running, None
                continue
            batch += self._received(reading, reading.future.result())
            num_received += 1
            while len(batch) >= running.batch_size:
                yield running, batch[: running.batch_size]
                batch = batch[running.batch_size :]

    def _most_ahead(self, running: _Running, num_received: int) -> int:
        """Samples to read ahead: enough for all readers, and no more than fit in some gigabytes.

        At first two batches only: the device waits for the first, and clips that are decoded beside it make it late.
        """
        width, height, num_frames = running.task.bucket
        fitting = _BYTES_AHEAD // (3 * width * height * (num_frames or 1))
        return max(2, min(2 * running.batch_size + min(num_received, self._num_threads), fitting))

    def _files(
        self, tasks: Iterable[Task], readers: ThreadPoolExecutor, writers: Threads
    ) -> Iterator[_Reading]:
        """Begin to read each file of each task; what has no future stands for a task's end."""
        for task in tasks:
            running = self._begin(task, writers)
            for _, group in groupby(task.samples, key=lambda sample: sample.file):
                samples = tuple(group)
                yield _Reading(running, samples, readers.submit(self._decode, samples))
            yield _Reading(running, (), None)

    def _received(self, reading: _Reading, result: list[_Decoded] | str) -> list[_Decoded]:
        if isinstance(result, str):
            for sample in reading.samples:
                self._fail(sample, result, reading.running.failures)
                reading.running.texts.drop(sample.caption.text)
            self._count_failure(reading.running.task, reading.samples[0].file.name, result)
            return []
        return result

    def _decode(self, group: Sequence[PlannedSample]) -> list[_Decoded] | str:
        """The samples of one file, or the reason why there are none."""
        file = group[0].file
        path = self._source / file.name
        try:
            loaded = self._medium.load(path)
            cuts = self._medium.read(loaded, group, derived_seed(self._recipe.seed, "crop", file.name))
            return [_Decoded(sample, cut, loaded.digest) for sample, cut in zip(group, cuts, strict=True)]
        except MediaError as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        except MemoryError:
            return "needs more memory than there is"

    def _fail(self, sample: PlannedSample, reason: str, failures: list[Failure]) -> None:
        failures.append(Failure(sample.name, reason))
        self._on_outcome(Outcome(sample.name, failure=reason))

    def _count_failure(self, task: Task, name: str, reason: str) -> None:
        self._failures_in_a_row += not task.retry
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise RunError(
                f"{MAX_FAILURES_IN_A_ROW} inputs in a row failed, the last one {name}: {reason}; what is "
                "committed is kept, and the same command goes on once the cause is mended"
            )

    # ---- encode -----------------------------------------------------------------------------

    def _queue(self, running: _Running, batch: list[_Decoded] | None) -> _Queued:
        """Have the device encode a batch, and do not wait for it."""
        nothing = torch.empty(0)
        if batch is None:
            return _Queued(running, None, nothing, nothing, {}, (), (), None)
        on_gpu = self._device.type == "cuda"
        cuts = [decoded.cut.pixels for decoded in batch]
        pixels = torch.empty((len(cuts), *cuts[0].shape), dtype=torch.uint8, pin_memory=on_gpu)
        torch.stack(cuts, out=pixels)
        texts = [running.texts.take(decoded.sample.caption.text) for decoded in batch]
        on_device = pixels.to(self._device, non_blocking=True)
        latents = self._encode_pixels(batch, on_device)
        extras: Columns = {}
        if self._recipe.video is None or self._recipe.video.mode == "video":
            extras = in_halves(self._processor.media_fields, pixels)
        psnrs: list[float | None] = [None] * len(batch)
        if self._verify:
            restored = in_halves(lambda part: {"pixels": self._processor.decode_latents(part)}, latents)
            psnrs = [psnr_db(*pair) for pair in zip(on_device, restored["pixels"], strict=True)]
        problems = to_host(latent_flags(latents))
        latents = to_host(latents)
        extras = {key: to_host(column) for key, column in extras.items()}
        ready = None
        if on_gpu:
            ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._device))
        return _Queued(running, batch, latents, problems, extras, texts, psnrs, ready)

    def _land(self, queued: _Queued, closing: deque[_Running]) -> None:
        """Hand a batch to its writer, once it is there."""
        running = queued.running
        if queued.samples is None:
            running.writer.finish()
            closing.append(running)
            return
        if queued.ready is not None:
            queued.ready.synchronize()
        # At once: each call of torch may have to wait for Python's lock.
        problems, latents = queued.problems.tolist(), queued.latents.unbind()
        for i, decoded in enumerate(queued.samples):
            text = queued.texts[i]
            problem = problem_of_flags(problems[i], latents[i])
            if problem is None and not text.finite[text.number]:
                problem = "its caption's embedding holds NaN or infinite values; try --dtype float32"
            if problem:
                self._fail(decoded.sample, problem, running.failures)
                self._count_failure(running.task, decoded.sample.name, problem)
                continue
            self._failures_in_a_row = 0
            extra = {key: column[i : i + 1] for key, column in queued.extras.items()}
            data = self._cache_data(decoded, latents[i], {**text.fields, **extra})
            row = metadata_row(decoded.sample, data, decoded.digest)
            running.writer.add(self._name(decoded), row, data)
            self._on_outcome(Outcome(decoded.sample.name, psnr_db=queued.psnrs[i]))

    def _encode_pixels(self, batch: Sequence[_Decoded], pixels: torch.Tensor) -> torch.Tensor:
        """Latents; where the device's memory is too small, in halves, and at last in tiles."""
        seeds = None
        if self._recipe.stochastic:
            seeds = [derived_seed(self._recipe.seed, "latent", d.sample.name, d.digest) for d in batch]
        if self._tiled or self._processor.bytes_needed(pixels) <= free_bytes(self._device):
            # Leaving the block lets go of what was computed until memory ran out.
            with suppress(torch.OutOfMemoryError):
                return self._processor.encode_pixels(pixels, seeds)
        torch.cuda.empty_cache()
        if len(batch) > 1:
            half = len(batch) // 2
            parts = (
                self._encode_pixels(batch[part], pixels[part]) for part in (slice(half), slice(half, None))
            )
            return torch.cat(list(parts))
        self._tiled = True
        if not self._processor.enable_tiling():
            raise RunError(
                f"the device's memory is too small for {batch[0].sample.name}; take a smaller resolution or fewer frames"
            )
        logger.warning(
            "the device's memory is too small to encode whole samples: going on in tiles, more slowly"
        )
        return self._encode_pixels(batch, pixels)

    def _name(self, decoded: _Decoded) -> str:
        """The sample's name in the cache: another one if anything that decides its bytes is another."""
        sample = decoded.sample
        identity = "\n".join([sample.name, decoded.digest, sample.caption.text, self._fingerprint])
        return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

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
            first_frame=cut.pixels[:, 0].permute(1, 2, 0).contiguous(),  # not the whole clip
            source_frame=cut.source_frame,
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """A file that is being read; without a future, the end of its task."""

    running: _Running
    samples: tuple[PlannedSample, ...]
    future: Future[list[_Decoded] | str] | None
