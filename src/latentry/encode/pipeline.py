"""Running tasks: decode, encode and write, overlapped, for images and videos alike.

Threads decode samples ahead (``read_ahead``), the calling thread feeds the device (``batch_encoder``), and other
threads write what the device has finished. After queuing batch k on a GPU, the calling thread waits for batch k - 2, so
the GPU always has the next batch in its queue. The pipeline does not pause between tasks. A sample that fails is
recorded and the others continue. Which samples share a batch depends on the task and the batch size.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from latentry.cache.latent_checks import problem_of_flags
from latentry.cache.write.commits import Commit
from latentry.cache.write.sample_data import (
    SampleData,
    caption_fields,
    image_data,
    sample_fields,
    sample_row,
    video_data,
)
from latentry.cache.write.task_writer import WriterThreads, task_writer
from latentry.encode.batch_encoder import BatchEncoder, QueuedBatch
from latentry.encode.caption_batches import EncodedCaption
from latentry.encode.device import gpu_feeding_priority, single_threaded_pool
from latentry.encode.read_ahead import DecodedSample, ReadAhead, RunningTask
from latentry.encode.recipe import ResolvedRecipe
from latentry.errors import RunError
from latentry.processors import Fields, Processor
from latentry.sources.folder import SourceFolders
from latentry.types import Failure, PlannedSample, Task

MAX_FAILURES_IN_A_ROW = 100
"""The run stops at this many consecutive failures: the cause is then probably not in the files. With several devices,
each worker process counts its own failures."""
_MAX_QUEUED_BATCHES = 2
"""On a GPU. On a CPU a batch is finished when the call returns."""
_MAX_CLOSING_TASKS = 2
"""Encoded tasks that may still be written while a GPU works on the next one."""
_NUM_WRITER_THREADS = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one sample, for progress reports."""

    name: str
    failure: str | None = None
    psnr_db: float | None = None


class TaskRunner:
    """Runs tasks with one loaded model on one device.

    Args:
        processor: The loaded model.
        recipe: The recipe of the cache.
        source: The folders of the inputs.
        output: The folder of the cache.
        batch_size: Samples encoded together; None chooses by bucket and device.
        num_threads: Threads that decode.
        device: The device's name.
        verify: Decode every latent and measure how close it is to the input.
        damaged: What to do with damaged inputs, one of ``DAMAGED``.
        on_outcome: Called for every sample.
    """

    def __init__(
        self,
        processor: Processor,
        recipe: ResolvedRecipe,
        source: SourceFolders,
        output: Path,
        *,
        batch_size: int | None,
        num_threads: int,
        device: str = "cpu",
        verify: bool = False,
        damaged: str = "skip",
        on_outcome: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        self._info = processor.info
        self._recipe = recipe
        self._fingerprint = recipe.fingerprint
        self._source = source
        self._output = output
        self._batch_size = batch_size
        self._num_threads = num_threads
        self._encoder = BatchEncoder(processor, recipe, torch.device(device), verify=verify)
        self._damaged = damaged
        self._on_outcome = on_outcome
        self._failures_in_a_row = 0

    def run(self, tasks: Iterable[Task]) -> Generator[Commit, None, None]:
        """Encode and write the tasks' samples. The files of a yielded commit are on disk."""
        queued: deque[QueuedBatch | RunningTask] = deque()
        closing: deque[RunningTask] = deque()
        on_gpu = self._encoder.on_gpu
        max_queued = _MAX_QUEUED_BATCHES if on_gpu else 0
        max_closing = _MAX_CLOSING_TASKS if on_gpu else 0
        with (
            gpu_feeding_priority() if on_gpu else nullcontext(),
            single_threaded_pool(self._num_threads) as readers,
            WriterThreads.running(_NUM_WRITER_THREADS) as writers,
        ):
            read_ahead = ReadAhead(
                self._recipe, self._source, self._output, readers, self._num_threads, damaged=self._damaged
            )
            running_tasks = (self._begin(task, writers) for task in tasks)
            try:
                for running, batch in read_ahead.batches(running_tasks, self._decoding_failed):
                    queued.append(running if batch is None else self._encoder.queue(running, batch))
                    while _first_is_due(queued, max_queued):
                        self._write_results(queued.popleft(), closing)
                    while closing and (closing[0].writer.done() or len(closing) > max_closing):
                        yield closing.popleft().commit()
                while queued:
                    self._write_results(queued.popleft(), closing)
                while closing:
                    yield closing.popleft().commit()
            except BaseException:
                readers.shutdown(wait=False, cancel_futures=True)
                raise

    def _begin(self, task: Task, writers: WriterThreads) -> RunningTask:
        stem = hashlib.blake2b(f"{task.id} {self._fingerprint}".encode(), digest_size=16).hexdigest()
        return RunningTask(
            task,
            task_writer(self._output, self._recipe.output_format, task.bucket, stem, writers),
            self._encoder.caption_batches(task.samples),
            # One at a time if only captions are encoded: a sample whose file in the cache is damaged is encoded whole.
            1 if task.captions_only else self._batch_size or self._encoder.batch_size(task.bucket),
        )

    # ---- results ----------------------------------------------------------------------------

    def _write_results(self, queued: QueuedBatch | RunningTask, closing: deque[RunningTask]) -> None:
        """Pass a finished batch to its writer; at the end of a task, tell the writer so."""
        if isinstance(queued, RunningTask):
            queued.writer.finish()
            closing.append(queued)
            return
        queued.wait()
        running = queued.running
        # All at once: each call into torch may have to wait for the GIL.
        flags, latents = queued.flags.tolist(), queued.latents.unbind()
        for i, decoded in enumerate(queued.samples):
            captions = queued.captions[i]
            problem = problem_of_flags(flags[i], latents[i])
            if problem is None and not all(caption.is_finite for caption in captions):
                problem = "has a caption whose embedding contains NaN or infinite values; try --dtype float32"
            if problem:
                self._fail(running, decoded.sample, problem)
                self._count_failure(running.task, decoded.sample.name, problem)
                continue
            self._failures_in_a_row = 0
            extra = {key: column[i : i + 1] for key, column in queued.extras.items()}
            data = self._sample_data(decoded, latents[i], captions, extra)
            running.writer.add(
                self._name(decoded),
                sample_row(decoded.sample, data, decoded.digest, decoded.crop.damage),
                data,
            )
            self._on_outcome(Outcome(decoded.sample.name, psnr_db=queued.psnr_db[i]))

    def _name(self, decoded: DecodedSample) -> str:
        """The sample's name in the cache. It changes with everything that decides the sample's bytes."""
        sample = decoded.sample
        texts = sample.caption.texts
        captions = texts[0] if len(texts) == 1 else f"{len(texts)} captions: {json.dumps(texts)}"
        identity = "\n".join([sample.name, decoded.digest, captions, self._fingerprint])
        return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

    def _sample_data(
        self,
        decoded: DecodedSample,
        latent: torch.Tensor,
        captions: Sequence[EncodedCaption],
        extra: Fields,
    ) -> SampleData:
        sample, crop = decoded.sample, decoded.crop
        texts = [caption_fields(caption.fields, self._recipe.media) for caption in captions]
        if decoded.stored is not None:
            extra = decoded.stored.without_captions(texts[0])
        fields = sample_fields(texts, extra)
        path = self._source.path(sample.file.name)
        if self._recipe.video is None:
            return image_data(sample, latent, fields, crop.offset, path, self._info)
        return video_data(
            sample,
            latent,
            fields,
            crop.offset,
            path,
            self._info,
            mode=self._recipe.video.mode,
            deterministic=not self._recipe.stochastic,
            first_frame=crop.pixels[:, 0].permute(1, 2, 0).contiguous(),  # not a view of the whole clip
            source_frame=crop.source_frame,
        )

    # ---- failures ---------------------------------------------------------------------------

    def _decoding_failed(self, running: RunningTask, samples: Sequence[PlannedSample], reason: str) -> None:
        for sample in samples:
            self._fail(running, sample, reason)
            for text in sample.caption.texts:
                running.captions.drop(text)
        self._count_failure(running.task, samples[0].file.name, reason)

    def _fail(self, running: RunningTask, sample: PlannedSample, reason: str) -> None:
        running.failures.append(Failure(sample.name, reason))
        self._on_outcome(Outcome(sample.name, failure=reason))

    def _count_failure(self, task: Task, name: str, reason: str) -> None:
        self._failures_in_a_row += not task.retry
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise RunError(
                f"{MAX_FAILURES_IN_A_ROW} inputs in a row failed, the last one was {name} ({reason}); committed "
                "samples are kept: fix the cause, then rerun the same command to resume"
            )


def _first_is_due(queued: Sequence[QueuedBatch | RunningTask], max_queued: int) -> bool:
    """Whether to wait for the first entry, so that at most ``max_queued`` batches remain on the device.

    The end of a task costs the device nothing. If it counted, the device would run dry at the end of each task.
    """
    num_batches = sum(isinstance(entry, QueuedBatch) for entry in queued)
    return bool(queued) and (isinstance(queued[0], RunningTask) or num_batches > max_queued)
