"""Cutting samples into tasks, and continuing tasks that an interrupted run has begun.

A resumed run must form the same batches as an uninterrupted one, because the batches decide the last bits of a latent.
The cut depends on the names and buckets of the samples, on what is already done, and on what failed before. Since tasks
are committed whole, and samples that failed before get separate tasks, a resumed run cuts the rest at the same points.
Checkpoints of unfinished tasks do not change the cut. They are looked up afterwards: a task that is cut as it was
continues where its checkpoint ends.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from latentry.cache.format import PACKED, TASK_SIZE, Row
from latentry.cache.write.commits import Checkpoint
from latentry.cache.write.shards import TARGET_SHARD_BYTES
from latentry.encode.planning.held_samples import has_captions, is_same_media
from latentry.encode.resolved_recipe import ResolvedRecipe
from latentry.sources.folder import SourceFolders
from latentry.types import Bucket, PlannedSample, ProcessorInfo, Task

_MAX_TASK_SIZE = 8192


def task_size_of(recipe: ResolvedRecipe, info: ProcessorInfo) -> Callable[[Bucket], int]:
    """Samples in a task, by bucket. In a packed cache, as many as fill a shard with their latents, within limits."""

    def size(bucket: Bucket) -> int:
        if recipe.output_format != PACKED:
            return TASK_SIZE
        width, height, num_frames = bucket
        frames = ((num_frames or 1) - 1) // info.temporal_factor + 1
        latents = (
            info.latent_channels * frames * (width // info.spatial_factor) * (height // info.spatial_factor)
        )
        return min(_MAX_TASK_SIZE, max(1, TARGET_SHARD_BYTES // (2 * latents)))

    return size


def bucket_rank(bucket: Bucket) -> tuple[int, int, int, int]:
    """What buckets are sorted by, the smallest first."""
    width, height, num_frames = bucket
    return (width * height, width, height, num_frames or 0)


def cut_into_tasks(
    samples: Iterable[PlannedSample], failed_before: frozenset[str], task_size: Callable[[Bucket], int]
) -> Iterable[Task]:
    """Tasks of one bucket each.

    Samples that failed before come last, in separate tasks, and samples of which only captions are encoded before them.
    So neither changes which of the other samples share a task.
    """
    groups: dict[tuple[bool, bool, Bucket], list[PlannedSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.name in failed_before, sample.stored_row is not None, sample.bucket].append(sample)
    for again, captions_only, bucket in sorted(groups, key=lambda key: (*key[:2], bucket_rank(key[2]))):
        group = groups[again, captions_only, bucket]
        size = task_size(bucket)
        for start in range(0, len(group), size):
            part = tuple(group[start : start + size])
            yield Task(_task_id(bucket, part), bucket, part, again)


def _task_id(bucket: Bucket, samples: Sequence[PlannedSample]) -> str:
    text = "\n".join([bucket.name, *(f"{s.name} {s.file} {s.caption}" for s in samples)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def without_damage(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without the rows of damaged inputs, which are encoded again."""
    return replace(checkpoint, rows=tuple(row for row in checkpoint.rows if not row.damage))


def continue_tasks(
    tasks: Iterable[Task],
    checkpoints: Iterable[Checkpoint],
    source: SourceFolders,
    task_size: Callable[[Bucket], int],
) -> tuple[list[Task], dict[str, Row]]:
    """The tasks with what their checkpoints have, and the rows of these samples.

    A sample that failed before a checkpoint is tried again, in a separate task after all others. A checkpoint of a
    task that is no longer cut like this, because inputs have changed, still has the rows of the unchanged samples.
    """
    cut = list(tasks)
    by_id = {checkpoint.task_id: checkpoint for checkpoint in checkpoints}
    fitting = {task.id for task in cut if task.id in by_id and _fits(by_id[task.id], task)}
    other_rows = {row.sample_name: row for id_, c in by_id.items() if id_ not in fitting for row in c.rows}
    continued: list[Task] = []
    done: dict[str, Row] = {}
    failed: list[PlannedSample] = []
    for task in cut:
        if task.id in fitting:
            checkpoint = by_id[task.id]
            continued.append(replace(task, num_finished=checkpoint.num_samples))
            done |= {row.sample_name: row for row in checkpoint.rows}
            names = {failure.name for failure in checkpoint.failures}
            failed += [sample for sample in task.samples[: checkpoint.num_samples] if sample.name in names]
            continue
        stored = {
            sample.name: other_rows[sample.name]
            for sample in task.samples
            if sample.name in other_rows
            and has_captions(other_rows[sample.name], sample.caption)
            and is_same_media(other_rows[sample.name], None, sample.file, source)
        }
        done |= stored
        rest = tuple(sample for sample in task.samples if sample.name not in stored)
        if len(rest) == len(task.samples):
            continued.append(task)
        elif rest:
            continued.append(Task(_task_id(task.bucket, rest), task.bucket, rest, task.retry))
    continued += cut_into_tasks(failed, frozenset(sample.name for sample in failed), task_size)
    return continued, done


def _fits(checkpoint: Checkpoint, task: Task) -> bool:
    """Whether the checkpoint has an outcome for each of the task's first samples."""
    names = [sample.name for sample in task.samples[: checkpoint.num_samples]]
    outcomes = {row.sample_name for row in checkpoint.rows} | {f.name for f in checkpoint.failures}
    return len(names) == checkpoint.num_samples and outcomes == set(names)
