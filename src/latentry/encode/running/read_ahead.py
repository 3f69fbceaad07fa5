"""Decoding ahead of the device: from tasks to batches of decoded samples.

Threads read and crop samples a few batches ahead of the encoder, across task boundaries. Memory stays bounded: no
more than a few batches are decoded at any time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from latentry.cache.format import row_from_dict
from latentry.cache.read.stored_samples import StoredSamples
from latentry.encode.resolved_recipe import ResolvedRecipe
from latentry.encode.running.running_task import RunningTask
from latentry.encode.running.stored_tensors import StoredTensors
from latentry.errors import CacheError, MediaError, RunError
from latentry.media.reader import Crop
from latentry.seeds import derived_seed
from latentry.sources.folder import SourceFolders
from latentry.types import Bucket, PlannedSample

logger = logging.getLogger(__name__)

_MAX_BYTES_AHEAD = 1 << 32
_MAX_BYTES_PER_READ = 1 << 29
"""Samples of one file are decoded together, up to this size: a film may give hundreds of clips."""


@dataclass(frozen=True, slots=True)
class DecodedSample:
    """A sample's pixels, and the digest of the file they come from."""

    sample: PlannedSample
    crop: Crop
    digest: str
    stored: StoredTensors | None = None
    """Set if only the captions are encoded. The pixels are then at most those of the first frame."""


@dataclass(frozen=True, slots=True)
class _PendingFile:
    """A file that a thread decodes. Without a future, it marks the end of its task."""

    running: RunningTask
    samples: tuple[PlannedSample, ...]
    future: Future[list[DecodedSample | str] | str] | None


OnFailure = Callable[[RunningTask, Sequence[PlannedSample], str], None]
"""Called with samples of a file that cannot be decoded, or are damaged, and the reason."""

DAMAGED = ("skip", "keep", "error")
"""What to do with damaged inputs: report them as failures, encode them all the same, or stop the run."""


def _num_bytes(bucket: Bucket) -> int:
    """Bytes of a sample's pixels."""
    return 3 * bucket.pixels * (bucket.num_frames or 1)


class ReadAhead:
    """Decodes the samples of tasks in order, in the threads of a pool.

    Args:
        recipe: The recipe of the cache.
        source: The folders of the inputs.
        output: The folder of the cache, from which samples are taken if only their captions have changed.
        pool: The threads.
        num_threads: How many they are.
        damaged: One of ``DAMAGED``.
    """

    def __init__(
        self,
        recipe: ResolvedRecipe,
        source: SourceFolders,
        output: Path,
        pool: ThreadPoolExecutor,
        num_threads: int,
        *,
        damaged: str,
    ) -> None:
        self._recipe = recipe
        self._reader = recipe.media_reader()
        self._source = source
        self._pool = pool
        self._num_threads = num_threads
        self._damaged = damaged
        self._stored = StoredSamples(output)

    def batches(
        self, tasks: Iterable[RunningTask], on_failure: OnFailure
    ) -> Iterator[tuple[RunningTask, list[DecodedSample] | None]]:
        """Decoded samples in groups of their task's batch size; None marks the end of a task."""
        pending = self._pending_files(tasks)
        ahead: deque[_PendingFile] = deque()
        num_ahead = num_decoded = 0
        batch: list[DecodedSample] = []
        exhausted = False
        while True:
            while not exhausted and (not ahead or num_ahead < self._max_ahead(ahead[0].running, num_decoded)):
                file = next(pending, None)
                if file is None:
                    exhausted = True
                else:
                    ahead.append(file)
                    num_ahead += len(file.samples)
            if not ahead:
                return
            file = ahead.popleft()
            running = file.running
            num_ahead -= len(file.samples)
            if file.future is None:
                if batch:
                    yield running, batch
                    batch = []
                yield running, None
                continue
            decoded = file.future.result()
            if isinstance(decoded, str):
                on_failure(running, file.samples, decoded)
            else:
                for sample, result in zip(file.samples, decoded, strict=True):
                    if isinstance(result, str):
                        on_failure(running, [sample], result)
                    else:
                        batch.append(result)
            num_decoded += 1
            while len(batch) >= running.batch_size:
                yield running, batch[: running.batch_size]
                batch = batch[running.batch_size :]

    def _max_ahead(self, running: RunningTask, num_decoded: int) -> int:
        """Samples to decode ahead: enough to keep all threads busy, limited by memory.

        At first only two batches: the device waits for the first one, and decoding more clips beside it delays it.
        """
        fitting = _MAX_BYTES_AHEAD // _num_bytes(running.task.bucket)
        return max(2, min(2 * running.batch_size + min(num_decoded, self._num_threads), fitting))

    def _pending_files(self, tasks: Iterable[RunningTask]) -> Iterator[_PendingFile]:
        """Submit the files of the tasks to the pool, one after the other."""
        for running in tasks:
            to_do = running.task.samples[running.task.num_finished :]
            for _, group in groupby(to_do, key=lambda sample: sample.file):
                samples = tuple(group)
                size = max(1, _MAX_BYTES_PER_READ // _num_bytes(running.task.bucket))
                for start in range(0, len(samples), size):
                    part = samples[start : start + size]
                    yield _PendingFile(running, part, self._pool.submit(self._decode, part))
            yield _PendingFile(running, (), None)

    def _decode(self, samples: Sequence[PlannedSample]) -> list[DecodedSample | str] | str:
        """The samples of one file, each or all of them replaced by the reason why they cannot be used."""
        decoded = self._decode_file(samples)
        if self._damaged == "error":
            for result in [decoded] if isinstance(decoded, str) else decoded:
                if isinstance(result, str):
                    raise RunError(
                        f"{samples[0].file.name} {result}; committed samples are kept: mend or move the file, or "
                        "leave out --damaged error, then rerun the same command to resume"
                    )
        return decoded

    def _decode_file(self, samples: Sequence[PlannedSample]) -> list[DecodedSample | str] | str:
        if samples[0].stored_row is not None:
            try:
                return [self._take_from_cache(sample) for sample in samples]
            except (CacheError, OSError) as error:
                logger.warning("%s is encoded again: %s", samples[0].file.name, error)
        file = samples[0].file
        path = self._source.path(file.name)
        try:
            media = self._reader.load(path)
            crops = self._reader.read(media, samples, derived_seed(self._recipe.seed, "crop", file.name))
            return [
                crop
                if isinstance(crop, str)
                else f"is damaged: {crop.damage}"
                if crop.damage and self._damaged != "keep"
                else DecodedSample(sample, crop, media.digest)
                for sample, crop in zip(samples, crops, strict=True)
            ]
        except MediaError as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        except MemoryError:
            return "needs more memory than there is"

    def _take_from_cache(self, sample: PlannedSample) -> DecodedSample:
        """What the cache holds of a sample whose captions alone have changed."""
        row = row_from_dict(dict(sample.stored_row or {}))
        stored = StoredTensors.of(self._stored.load(row))
        crop = Crop(stored.first_frame, stored.offset, stored.source_frame, row.damage or None)
        return DecodedSample(sample, crop, row.source_digest, stored)
