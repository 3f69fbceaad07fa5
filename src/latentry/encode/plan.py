"""From a recipe and a folder to a plan: every input's fate, before a single pixel is decoded.

Planning reads headers and captions only. What the cache already holds, unchanged, is done; what cannot be
read is a failure with its reason; the rest is cut into tasks. The cutting depends on names alone, so a run
that was stopped and one that was not form the same batches, and batches decide the last bit of a latent.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from latentry.cache.format import PACKED, TASK_SIZE
from latentry.cache.packed.shards import USUAL_SHARD_BYTES
from latentry.encode.recipe import BucketChooser, ResolvedRecipe
from latentry.errors import MediaError
from latentry.media.reader import MediaReader, ProbeResult
from latentry.sources.captions import CaptionFinder
from latentry.storage import content_digest
from latentry.types import (
    Bucket,
    Caption,
    Failure,
    PlannedSample,
    ProcessorInfo,
    SourceFile,
    Task,
    bucket_name,
)

_MOST_IN_TASK = 8192
_PROBE_THREADS = 8
_PROBE_CHUNK = 32
"""Files that a thread looks at before it reports; handing over single ones costs more than reading headers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is to be done, and what became of every input that needs nothing done."""

    tasks: tuple[Task, ...]
    done: Mapping[str, Mapping[str, Any]]
    """Sample name to row, for what the cache holds unchanged."""
    skipped: tuple[Failure, ...]
    """Inputs whose headers already say that they cannot be encoded."""
    files: frozenset[str]
    """The names of all inputs."""
    vanished: tuple[str, ...]
    """Samples of the cache whose file the source no longer has."""
    captions: Counter[str] = field(default_factory=Counter)
    caption_problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_to_encode(self) -> int:
        return sum(len(task.samples) for task in self.tasks)

    def buckets(self) -> dict[Bucket, int]:
        """Samples per bucket once the plan is carried out, smallest bucket first."""
        planned = Counter({task.bucket: 0 for task in self.tasks})
        for task in self.tasks:
            planned[task.bucket] += len(task.samples)
        return count_buckets(self.done.values(), planned)


def count_buckets(
    rows: Iterable[Mapping[str, Any]], more: Mapping[Bucket, int] | None = None
) -> dict[Bucket, int]:
    """Rows per bucket, smallest bucket first."""
    counts: Counter[Bucket] = Counter(more or {})
    for row in rows:
        width, height = row["bucket_resolution"]
        counts[width, height, row.get("num_frames")] += 1
    return dict(sorted(counts.items(), key=lambda item: _bucket_rank(item[0])))


def make_plan(
    files: Sequence[SourceFile],
    root: Path,
    medium: MediaReader,
    choose_buckets: BucketChooser,
    finder: CaptionFinder,
    *,
    known: Mapping[str, Mapping[str, Any]],
    task_size: Callable[[Bucket], int] = lambda _: TASK_SIZE,
    unreadable: Sequence[Failure] = (),
    failed_before: Iterable[str] = (),
    on_progress: Callable[[int], None] = lambda _: None,
) -> Plan:
    """Decide every file's fate. ``known`` are the rows that the cache has, by sample name."""
    known_of_file: dict[str, list[str]] = defaultdict(list)
    for name, row in known.items():
        known_of_file[row["source_name"]].append(name)
    done: dict[str, Mapping[str, Any]] = {}
    waiting: list[tuple[SourceFile, Caption]] = []
    unnameable = []
    for file in files:
        if not _is_text(file.name):
            unnameable.append(Failure(ascii(file.name)[1:-1], "its name is not valid UTF-8; rename it"))
            continue
        caption = finder.find(file.name)
        rows = {name: known[name] for name in known_of_file[file.name]}
        if rows and all(_unchanged(row, len(rows), caption, file, root) for row in rows.values()):
            done |= rows
        else:
            waiting.append((file, caption))
    samples, skipped = _probe(waiting, root, medium, choose_buckets, on_progress)
    # Of a file that gives several samples, those that are done stay done.
    again = []
    for sample in samples:
        held = known.get(sample.name)
        if held is not None and _unchanged(held, None, sample.caption, sample.file, root):
            done[sample.name] = held
        else:
            again.append(sample)
    names = {file.name for file in files}
    return Plan(
        tasks=tuple(_cut(again, frozenset(failed_before), task_size)),
        done=done,
        skipped=(*unreadable, *unnameable, *skipped),
        files=frozenset(names),
        vanished=tuple(
            name
            for name, row in known.items()
            if row["source_name"] not in names and not (root / row["source_name"]).exists()
        ),
        captions=finder.counts,
        caption_problems=finder.problems,
    )


def _is_text(name: str) -> bool:
    """Whether the name can be written down: file systems allow bytes that are no characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unchanged(
    row: Mapping[str, Any], num_known: int | None, caption: Caption, file: SourceFile, root: Path
) -> bool:
    """Same caption and size and time; where only the time differs, the same content.

    With ``num_known``, also: the file's samples are all there.
    """
    if row["prompt"] != caption.text or row["source_bytes"] != file.size_bytes:
        return False
    if num_known is not None and row.get("total_frames_extracted", 1) != num_known:
        return False
    if row["source_modified_ns"] == file.modified_ns:
        return True
    try:
        return bool(row["source_digest"] == content_digest(root / file.name))
    except OSError:
        return False


def _probe(
    waiting: Sequence[tuple[SourceFile, Caption]],
    root: Path,
    medium: MediaReader,
    choose_buckets: BucketChooser,
    on_progress: Callable[[int], None],
) -> tuple[list[PlannedSample], list[Failure]]:
    def extent_or_reason(file: SourceFile) -> ProbeResult | str:
        try:
            return medium.probe(root / file.name)
        except MediaError as error:
            return str(error)

    readable: list[tuple[SourceFile, Caption, ProbeResult]] = []
    skipped = []

    def probe_all(part: Sequence[tuple[SourceFile, Caption]]) -> list[ProbeResult | str]:
        return [extent_or_reason(file) for file, _ in part]

    size = min(_PROBE_CHUNK, max(1, len(waiting) // (4 * _PROBE_THREADS)))
    parts = [waiting[i : i + size] for i in range(0, len(waiting), size)]
    with ThreadPoolExecutor(_PROBE_THREADS) as pool:
        try:
            probed = chain.from_iterable(pool.map(probe_all, parts))
            for count, ((file, caption), extent) in enumerate(zip(waiting, probed, strict=True), start=1):
                if isinstance(extent, str):
                    skipped.append(Failure(file.name, extent))
                else:
                    readable.append((file, caption, extent))
                on_progress(count)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    buckets = choose_buckets([(extent.width, extent.height) for *_, extent in readable])
    samples = [
        PlannedSample(
            file, caption, extent.width, extent.height, *bucket, extent.num_frames, number, extent.num_samples
        )
        for (file, caption, extent), bucket in zip(readable, buckets, strict=True)
        for number in range(extent.num_samples)
    ]
    return samples, skipped


def _bucket_rank(bucket: Bucket) -> tuple[int, int, int, int]:
    width, height, num_frames = bucket
    return (width * height, width, height, num_frames or 0)


def task_size_of(recipe: ResolvedRecipe, info: ProcessorInfo) -> Callable[[Bucket], int]:
    """Samples in a task, by bucket: where they are packed, as many as fill a shard with their latents."""

    def size(bucket: Bucket) -> int:
        if recipe.output_format != PACKED:
            return TASK_SIZE
        width, height, num_frames = bucket
        frames = ((num_frames or 1) - 1) // info.temporal_factor + 1
        latents = (
            info.latent_channels * frames * (width // info.spatial_factor) * (height // info.spatial_factor)
        )
        return min(_MOST_IN_TASK, max(1, USUAL_SHARD_BYTES // (2 * latents)))

    return size


def _cut(
    samples: Iterable[PlannedSample], failed_before: frozenset[str], task_size: Callable[[Bucket], int]
) -> Iterable[Task]:
    """Tasks of one bucket each; what failed before comes last and apart, so that it shifts no batch."""
    groups: dict[tuple[bool, Bucket], list[PlannedSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.name in failed_before, (*sample.bucket, sample.num_frames)].append(sample)
    for again, bucket in sorted(groups, key=lambda key: (key[0], _bucket_rank(key[1]))):
        group = groups[again, bucket]
        size = task_size(bucket)
        for start in range(0, len(group), size):
            part = tuple(group[start : start + size])
            text = "\n".join([bucket_name(bucket), *(f"{s.name} {s.file} {s.caption}" for s in part)])
            yield Task(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), bucket, part, again)
