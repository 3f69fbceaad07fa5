"""Running tasks: decode, encode and write, overlapped, for images and videos alike.

Threads decode samples ahead (``read_ahead``), the calling thread feeds the device (``batch_encoder``), and other
threads write what the device has finished. After queuing batch k on a GPU, the calling thread waits for batch k - 2, so
the GPU always has the next batch in its queue. The pipeline does not pause between tasks. A sample that fails is
recorded and the others continue. Which samples share a batch depends on the task and the batch size.

A task is committed when all its samples are on disk. If it takes long, checkpoints are written in between, and one
more if the run stops for whatever reason.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch

from latentry.cache.latent_checks import problem_of_flags
from latentry.cache.write.sample_data import (
    SampleData,
    caption_fields,
    image_data,
    sample_fields,
    sample_row,
    video_data,
)
from latentry.cache.write.task_writer import WriterThreads, task_writer
from latentry.cache.write.workspace import Workspace
from latentry.encode.resolved_recipe import ResolvedRecipe
from latentry.encode.running.batch_encoder import BatchEncoder, QueuedBatch
from latentry.encode.running.caption_batches import CaptionBatches, EncodedCaption
from latentry.encode.running.device import gpu_feeding_priority, single_threaded_pool
from latentry.encode.running.read_ahead import DecodedSample, ReadAhead
from latentry.encode.running.running_task import RunningTask
from latentry.errors import LatentryError, TooManyFailuresError
from latentry.processors import Fields, Processor
from latentry.sources.folder import SourceFolders
from latentry.types import Failure, PlannedSample, Task

CHECKPOINT_INTERVAL_S = 30.0
MAX_FAILURES = 100
"""The run stops at this many failures in a row: the cause is then probably not in the files. With several devices,
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
        workspace: The folder of the cache, and its commits.
        batch_size: Samples encoded together; None chooses by bucket and device.
        num_threads: Threads that decode.
        max_samples_ahead: How many samples of tasks that have not begun may have their captions encoded.
        device: The device's name.
        verify: Decode every latent and measure how close it is to the input.
        damaged: What to do with damaged inputs, one of ``DAMAGED``.
        max_failures: Stop at this many failures in a row; 0 never stops.
        checkpoint_interval_s: Write a checkpoint of each running task at least this often.
        on_outcome: Called for every sample.
    """

    def __init__(
        self,
        processor: Processor,
        recipe: ResolvedRecipe,
        source: SourceFolders,
        workspace: Workspace,
        *,
        batch_size: int | None,
        num_threads: int,
        max_samples_ahead: int = 4096,
        device: str = "cpu",
        verify: bool = False,
        damaged: str = "skip",
        max_failures: int = MAX_FAILURES,
        checkpoint_interval_s: float = CHECKPOINT_INTERVAL_S,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        self._info = processor.info
        self._recipe = recipe
        self._fingerprint = recipe.fingerprint
        self._source = source
        self._workspace = workspace
        self._batch_size = batch_size
        self._num_threads = num_threads
        self._encoder = BatchEncoder(
            processor, recipe, torch.device(device), verify=verify, max_samples_ahead=max_samples_ahead
        )
        self._damaged = damaged
        self._max_failures = max_failures
        self._checkpoint_interval_s = checkpoint_interval_s
        self._on_outcome = on_outcome
        self._failures_in_a_row = 0
        self._running: list[RunningTask] = []
        self._settled_at_s = time.monotonic()

    def run(self, tasks: Iterable[Task]) -> None:
        """Encode, write and commit the tasks' samples."""
        queued: deque[QueuedBatch | RunningTask] = deque()
        closing: deque[RunningTask] = deque()
        is_asynchronous = self._encoder.is_asynchronous
        max_queued = _MAX_QUEUED_BATCHES if is_asynchronous else 0
        max_closing = _MAX_CLOSING_TASKS if is_asynchronous else 0
        with (
            gpu_feeding_priority() if is_asynchronous else nullcontext(),
            single_threaded_pool(self._num_threads) as readers,
            WriterThreads.running(_NUM_WRITER_THREADS) as writers,
        ):
            read_ahead = ReadAhead(
                self._recipe,
                self._source,
                self._workspace.folder,
                readers,
                self._num_threads,
                damaged=self._damaged,
            )
            running_tasks = (
                self._begin(task, captions, writers)
                for task, captions in self._encoder.caption_passes.begin(tasks)
            )
            try:
                for running, batch in read_ahead.batches(running_tasks, self._decoding_failed):
                    queued.append(running if batch is None else self._encoder.queue(running, batch))
                    while _first_is_due(queued, max_queued):
                        self._write_results(queued.popleft(), closing)
                    self._commit_checkpoints()
                    while closing and (closing[0].writer.done() or len(closing) > max_closing):
                        self._commit(closing.popleft())
                while queued:
                    self._write_results(queued.popleft(), closing)
                while closing:
                    self._commit(closing.popleft())
            except BaseException:
                readers.shutdown(wait=False, cancel_futures=True)
                self._commit_last_checkpoints()
                raise

    def _begin(self, task: Task, captions: CaptionBatches, writers: WriterThreads) -> RunningTask:
        stem = hashlib.blake2b(f"{task.id} {self._fingerprint}".encode(), digest_size=16).hexdigest()
        running = RunningTask(
            task,
            task_writer(self._workspace.folder, self._recipe.output_format, task.bucket, stem, writers),
            captions,
            # One at a time if only captions are encoded: a sample whose file in the cache is damaged is encoded whole.
            1 if task.captions_only else self._batch_size or self._encoder.batch_size(task.bucket),
        )
        if task.num_finished:
            running.restore(self._workspace.checkpoint_of(task.id))
        self._running.append(running)
        return running

    # ---- commits ----------------------------------------------------------------------------

    def _commit(self, running: RunningTask) -> None:
        self._workspace.commit(running.commit())
        self._running.remove(running)

    def _commit_checkpoints(self) -> None:
        """Commit the checkpoints whose samples are on disk by now."""
        for running in self._running:
            if (checkpoint := running.finished_checkpoint()) is not None:
                self._workspace.commit(checkpoint)

    def _commit_last_checkpoints(self) -> None:
        """Keep what is finished of a run that stops. A second error does not hide the first."""
        for running in self._running:
            with suppress(LatentryError):
                if (checkpoint := running.last_checkpoint()) is not None:
                    self._workspace.commit(checkpoint)

    def _settle(self, running: RunningTask, last: PlannedSample, num_rows: int) -> None:
        """Record the end of a batch; begin a checkpoint if one would be overdue after another batch like it."""
        now_s = time.monotonic()
        batch_duration_s, self._settled_at_s = now_s - self._settled_at_s, now_s
        running.settle(last, num_rows)
        if running.saved_at_s is None:
            running.saved_at_s = now_s - batch_duration_s
        if now_s + batch_duration_s - running.saved_at_s >= self._checkpoint_interval_s:
            running.begin_checkpoint(now_s)
            overdue = 2 * batch_duration_s >= self._checkpoint_interval_s
            if overdue and (saved := running.finished_checkpoint(wait=True)) is not None:
                self._workspace.commit(saved)  # the next chance comes after another long batch

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
        outcomes = []
        for i, decoded in enumerate(queued.samples):
            captions = queued.captions[i]
            problem = problem_of_flags(flags[i], latents[i])
            if problem is None and not all(caption.is_finite for caption in captions):
                problem = "has a caption whose embedding contains NaN or infinite values; try --dtype float32"
            if problem:
                running.failures.append(Failure(decoded.sample.name, problem))
                outcomes.append(Outcome(decoded.sample.name, failure=problem))
                continue
            extra = {key: column[i : i + 1] for key, column in queued.extras.items()}
            data = self._sample_data(decoded, latents[i], captions, extra)
            running.writer.add(
                self._name(decoded),
                sample_row(decoded.sample, data, decoded.digest, decoded.crop.damage),
                data,
            )
            outcomes.append(Outcome(decoded.sample.name, psnr_db=queued.psnr_db[i]))
        num_failed = sum(outcome.failure is not None for outcome in outcomes)
        self._settle(running, queued.samples[-1].sample, len(outcomes) - num_failed)
        for outcome in outcomes:
            self._on_outcome(outcome)
            if outcome.failure is None:
                self._failures_in_a_row = 0
            else:
                self._count_failure(running.task, outcome.name, outcome.failure)

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
            running.failures.append(Failure(sample.name, reason))
            for text in sample.caption.texts:
                running.captions.drop(text)
            self._on_outcome(Outcome(sample.name, failure=reason))
        self._count_failure(running.task, samples[0].file.name, reason)

    def _count_failure(self, task: Task, name: str, reason: str) -> None:
        if task.retry:
            return
        self._failures_in_a_row += 1
        if self._failures_in_a_row == self._max_failures:
            raise TooManyFailuresError(
                f"{self._max_failures} inputs in a row failed, the last one was {name} ({reason}); finished samples "
                "are kept and failures.jsonl lists the failures: fix the cause, or set --max_failures (0 for no "
                "limit), then rerun the same command to resume"
            )


def _first_is_due(queued: Sequence[QueuedBatch | RunningTask], max_queued: int) -> bool:
    """Whether to wait for the first entry, so that at most ``max_queued`` batches remain on the device.

    The end of a task costs the device nothing. If it counted, the device would run dry at the end of each task.
    """
    num_batches = sum(isinstance(entry, QueuedBatch) for entry in queued)
    return bool(queued) and (isinstance(queued[0], RunningTask) or num_batches > max_queued)
