"""From a recipe and a list of files to a plan: what happens to every input, before any pixel is decoded.

Planning looks up all captions. An input that the cache already holds unchanged is done. If only its captions have
changed, the rest is taken from the cache. Of the others, the headers are read. An input that cannot be read is a
failure with its reason. The rest is cut into tasks.

A resumed run must form the same batches as an uninterrupted one, because the batches decide the last bits of a latent.
The cut depends on the names and buckets of the samples, on what is already done, and on what failed before. Since tasks
are committed whole, and samples that failed before get separate tasks, a resumed run cuts the rest at the same points.
Checkpoints of unfinished tasks do not change the cut. They are looked up afterwards: a task that is cut as it was
continues where its checkpoint ends.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from latentry.buckets import MultiTierBucketCalculator
from latentry.cache.format import PACKED, TASK_SIZE, Row
from latentry.cache.write.commits import Checkpoint
from latentry.cache.write.shards import TARGET_SHARD_BYTES
from latentry.encode.held_samples import has_captions, is_same_media, planned_sample
from latentry.encode.recipe import ResolvedRecipe
from latentry.encode.repeats import Repeats
from latentry.encode.sizes import SizeRules, SizeSummary
from latentry.errors import MediaError
from latentry.media.reader import MediaReader, ProbeResult
from latentry.sources.caption_folders import CaptionFolders
from latentry.sources.captions import NO_CAPTION
from latentry.sources.folder import SourceFolders
from latentry.types import (
    Bucket,
    Caption,
    Failure,
    PlannedSample,
    ProcessorInfo,
    SizeChange,
    SourceFile,
    Task,
)

_MAX_TASK_SIZE = 8192
_PROBE_THREADS = 8
_PROBE_CHUNK = 32
"""Files per call in a thread. Submitting single files costs more than reading their headers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The tasks to run, and what happens to every input that needs no work."""

    tasks: tuple[Task, ...]
    done: Mapping[str, Row]
    """Sample name to row, for samples that the cache holds unchanged."""
    skipped: tuple[Failure, ...]
    """Inputs whose headers already show that they cannot be encoded."""
    vanished: tuple[str, ...]
    """Samples of the cache whose input no longer exists."""
    kept: Mapping[str, Row] = field(default_factory=dict)
    """Samples of the cache whose input exists but is not part of this run, by name. They stay in the cache."""
    left_out: tuple[Failure, ...] = ()
    """Inputs that the user's own rules leave out, such as a size limit. They are not failures."""
    notes: Counter[str] = field(default_factory=Counter)
    """What the headers say about how inputs are read, with the number of inputs for each text."""
    size_changes: Mapping[Bucket, SizeChange] = field(default_factory=dict)
    """The mean change of the samples of each bucket, where their original size is known."""
    warnings: tuple[str, ...] = ()
    """What the user should look at before training."""
    captions: Counter[str] = field(default_factory=Counter)
    caption_problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_to_encode(self) -> int:
        return sum(len(task.samples) - task.num_finished for task in self.tasks)

    @property
    def captions_only(self) -> frozenset[str]:
        """The names of the samples of which only the captions are encoded."""
        return frozenset(
            sample.name
            for task in self.tasks
            if task.captions_only
            for sample in task.samples[task.num_finished :]
        )

    def buckets(self, repeats: Repeats | None = None) -> dict[Bucket, int]:
        """Samples per bucket after the run, smallest bucket first; with ``repeats``, as often as an epoch has them."""
        counts: Counter[Bucket] = Counter()
        for task in self.tasks:
            for sample in task.samples[task.num_finished :]:
                counts[task.bucket] += repeats.number(sample.file.name) if repeats else 1
        for row in (*self.done.values(), *self.kept.values()):
            counts[row.bucket] += repeats.number(row.source_name, row.repeat + 1) if repeats else 1
        return _sorted_buckets(counts)


def count_buckets(rows: Iterable[Row]) -> dict[Bucket, int]:
    """Rows per bucket, smallest bucket first."""
    return _sorted_buckets(Counter(row.bucket for row in rows))


def _sorted_buckets(counts: Mapping[Bucket, int]) -> dict[Bucket, int]:
    return dict(sorted(counts.items(), key=lambda item: _bucket_rank(item[0])))


def make_plan(
    files: Sequence[SourceFile],
    source: SourceFolders,
    reader: MediaReader,
    choose_buckets: BucketChooser,
    finder: CaptionFolders,
    *,
    known: Mapping[str, Row],
    checkpoints: Sequence[Checkpoint] = (),
    sizes: SizeRules = SizeRules(),  # noqa: B008 - frozen
    task_size: Callable[[Bucket], int] = lambda _: TASK_SIZE,
    unreadable: Sequence[Failure] = (),
    failed_before: Iterable[str] = (),
    keep_damaged: bool = False,
    on_progress: Callable[[int, int, int], None] = lambda *_: None,
) -> Plan:
    """Decide what happens to every file. ``known`` are the cache's rows by sample name.

    ``on_progress`` gets the number of files that are planned, of all files, and of those that failed.
    """
    names = {file.name for file in files}
    all_rows = {row.sample_name: row for checkpoint in checkpoints for row in checkpoint.rows} | dict(known)
    elsewhere = {name: row for name, row in all_rows.items() if row.source_name not in names}
    kept = {name: row for name, row in elsewhere.items() if source.path(row.source_name).exists()}
    if not keep_damaged:
        known = {name: row for name, row in known.items() if not row.damage}
        checkpoints = [_without_damage(checkpoint) for checkpoint in checkpoints]
    known_of_file: dict[str, list[str]] = defaultdict(list)
    for name, row in known.items():
        known_of_file[row.source_name].append(name)
    done: dict[str, Row] = {}
    left_out: list[Failure] = []
    changed: list[tuple[SourceFile, Caption]] = []
    unnameable, without_caption = [], []
    to_encode: list[PlannedSample] = []
    for file in files:
        if not _is_unicode(file.name):
            unnameable.append(
                Failure(ascii(file.name)[1:-1], "has a name that is not valid UTF-8; rename it")
            )
            continue
        caption = finder.find(file.name)
        if caption is None:
            without_caption.append(Failure(file.name, NO_CAPTION))
            continue
        rows = {name: known[name] for name in known_of_file[file.name]}
        if rows and all(is_same_media(row, len(rows), file, source) for row in rows.values()):
            if broken := _rule_broken_by(rows.values(), sizes):
                left_out.append(Failure(file.name, broken))
                continue
            for name, row in rows.items():
                if has_captions(row, caption):
                    done[name] = row
                else:
                    to_encode.append(planned_sample(row, file, caption, stored_row=row.to_dict()))
        else:
            changed.append((file, caption))
    num_files, num_failed = len(files) + len(unreadable), len(unreadable) + len(unnameable)
    if finder.required:
        num_failed += len(without_caption)
    num_before = num_files - len(changed)
    on_progress(num_before, num_files, num_failed)
    samples, skipped, notes = _probe(
        changed,
        source,
        reader,
        choose_buckets,
        lambda count, failed: on_progress(num_before + count, num_files, num_failed + failed),
    )
    # Of a file that gives several samples, some may be done.
    for sample in samples:
        held = known.get(sample.name)
        if broken := sizes.broken_by((sample.width, sample.height), sample.bucket):
            if sample.number == 0:
                left_out.append(Failure(sample.file.name, broken))
        elif held is None or not is_same_media(held, None, sample.file, source):
            to_encode.append(sample)
        elif has_captions(held, sample.caption):
            done[sample.name] = held
        else:
            to_encode.append(replace(sample, stored_row=held.to_dict()))
    finder.note_unmatched_entries()
    if not finder.required:
        left_out += without_caption
        without_caption = []
    tasks, stored = _continued(
        _cut(to_encode, frozenset(failed_before), task_size), checkpoints, source, task_size
    )
    done |= stored
    summary = SizeSummary(sizes)
    for task in tasks:
        for sample in task.samples[task.num_finished :]:
            summary.add(sample.file.name, (sample.width, sample.height), sample.bucket)
    for row in done.values():
        if row.original_resolution is not None:
            summary.add(row.source_name, row.original_resolution, row.bucket)
    return Plan(
        tasks=tuple(tasks),
        done=done,
        skipped=(*unreadable, *unnameable, *skipped, *without_caption),
        vanished=tuple(name for name in elsewhere if name not in kept),
        kept=kept,
        left_out=tuple(sorted(left_out, key=lambda failure: failure.name)),
        size_changes=summary.means(),
        warnings=summary.warnings(),
        notes=notes,
        captions=finder.counts,
        caption_problems=finder.problems,
    )


def _is_unicode(name: str) -> bool:
    """Whether the name can be written as text: file systems allow bytes that are not valid UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _rule_broken_by(rows: Iterable[Row], sizes: SizeRules) -> str | None:
    """Why an input that the cache holds is left out of this run; None if it is not."""
    for row in rows:
        if row.original_resolution is not None and (
            broken := sizes.broken_by(row.original_resolution, row.bucket)
        ):
            return broken
    return None


# ---- headers and buckets --------------------------------------------------------------------

BucketChooser = Callable[[Sequence[tuple[int, int]]], Sequence[tuple[int | None, tuple[int, int]]]]
"""Sizes to (bucket id, (width, height)) for each."""


def bucket_chooser(recipe: ResolvedRecipe) -> BucketChooser:
    """Chooses buckets under the recipe's pixel budget, or its one size for all."""
    if recipe.size is not None:
        fixed: tuple[int | None, tuple[int, int]] = (None, recipe.size)
        return lambda sizes: [fixed] * len(sizes)
    calculator = MultiTierBucketCalculator(
        recipe.quantization, recipe.max_pixels, aspect_ratios=recipe.aspect_ratios
    )

    def choose(sizes: Sequence[tuple[int, int]]) -> list[tuple[int | None, tuple[int, int]]]:
        table = np.array(sizes, dtype=np.int64).reshape(-1, 2)
        ids = calculator.assign(table[:, 0], table[:, 1]).tolist()
        return [(number, calculator.get_bucket_by_id(number)["resolution"]) for number in ids]

    return choose


def _probe(
    files: Sequence[tuple[SourceFile, Caption]],
    source: SourceFolders,
    reader: MediaReader,
    choose_buckets: BucketChooser,
    on_progress: Callable[[int, int], None],
) -> tuple[list[PlannedSample], list[Failure], Counter[str]]:
    """Read the files' headers in threads, and choose buckets for all of them at once."""

    def probe_one(file: SourceFile) -> ProbeResult | str:
        try:
            return reader.probe(source.path(file.name))
        except MediaError as error:
            return str(error)

    def probe_all(part: Sequence[tuple[SourceFile, Caption]]) -> list[ProbeResult | str]:
        return [probe_one(file) for file, _ in part]

    readable: list[tuple[SourceFile, Caption, ProbeResult]] = []
    skipped = []
    size = min(_PROBE_CHUNK, max(1, len(files) // (4 * _PROBE_THREADS)))
    parts = [files[i : i + size] for i in range(0, len(files), size)]
    with ThreadPoolExecutor(_PROBE_THREADS) as pool:
        try:
            results = chain.from_iterable(pool.map(probe_all, parts))
            for count, ((file, caption), probed) in enumerate(zip(files, results, strict=True), start=1):
                if isinstance(probed, str):
                    skipped.append(Failure(file.name, probed))
                else:
                    readable.append((file, caption, probed))
                on_progress(count, len(skipped))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    buckets = choose_buckets([(probed.width, probed.height) for *_, probed in readable])
    samples = [
        PlannedSample(
            file,
            caption,
            width=probed.width,
            height=probed.height,
            bucket_id=bucket_id,
            bucket=Bucket(*resolution, window.num_frames if window else probed.num_frames),
            number=number,
            num_samples=probed.num_samples,
            window=window,
        )
        for (file, caption, probed), (bucket_id, resolution) in zip(readable, buckets, strict=True)
        for number, window in enumerate(probed.windows or [None] * probed.num_samples)
    ]
    return samples, skipped, Counter(note for *_, probed in readable for note in probed.notes)


# ---- tasks ----------------------------------------------------------------------------------


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


def _bucket_rank(bucket: Bucket) -> tuple[int, int, int, int]:
    width, height, num_frames = bucket
    return (width * height, width, height, num_frames or 0)


def _cut(
    samples: Iterable[PlannedSample], failed_before: frozenset[str], task_size: Callable[[Bucket], int]
) -> Iterable[Task]:
    """Tasks of one bucket each.

    Samples that failed before come last, in separate tasks, and samples of which only captions are encoded before them.
    So neither changes which of the other samples share a task.
    """
    groups: dict[tuple[bool, bool, Bucket], list[PlannedSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.name in failed_before, sample.stored_row is not None, sample.bucket].append(sample)
    for again, captions_only, bucket in sorted(groups, key=lambda key: (*key[:2], _bucket_rank(key[2]))):
        group = groups[again, captions_only, bucket]
        size = task_size(bucket)
        for start in range(0, len(group), size):
            part = tuple(group[start : start + size])
            yield Task(_task_id(bucket, part), bucket, part, again)


def _task_id(bucket: Bucket, samples: Sequence[PlannedSample]) -> str:
    text = "\n".join([bucket.name, *(f"{s.name} {s.file} {s.caption}" for s in samples)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---- checkpoints ----------------------------------------------------------------------------


def _without_damage(checkpoint: Checkpoint) -> Checkpoint:
    return replace(checkpoint, rows=tuple(row for row in checkpoint.rows if not row.damage))


def _continued(
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
    continued += _cut(failed, frozenset(sample.name for sample in failed), task_size)
    return continued, done


def _fits(checkpoint: Checkpoint, task: Task) -> bool:
    """Whether the checkpoint has an outcome for each of the task's first samples."""
    names = [sample.name for sample in task.samples[: checkpoint.num_samples]]
    outcomes = {row.sample_name for row in checkpoint.rows} | {f.name for f in checkpoint.failures}
    return len(names) == checkpoint.num_samples and outcomes == set(names)
