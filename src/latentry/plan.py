"""From a recipe and a folder to a plan: every input's fate, before a single pixel is decoded.

Planning reads headers and captions only. What the cache already holds, unchanged, is done; what cannot be
read is a failure with its reason; the rest is cut into tasks. The cutting depends on names alone, so a run
that was stopped and one that was not form the same batches, and batches decide the last bit of a latent.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from latentry.buckets import CROP_MODES, MultiTierBucketCalculator
from latentry.cache.shards import USUAL_SHARD_BYTES
from latentry.cache.writer import PACKED
from latentry.captions import CAPTION_FORMATS, CaptionFinder
from latentry.errors import ConfigError, MediaError
from latentry.media.images import NO_CROP
from latentry.media.kinds import Extent, Images, Medium, VideoChoices, Videos
from latentry.records import (
    Bucket,
    Caption,
    Failure,
    PlannedSample,
    ProcessorInfo,
    SourceFile,
    Task,
    bucket_name,
)
from latentry.storage import content_digest

DTYPES = ("auto", "float32", "float16", "bfloat16")
OUTPUT_FORMATS = ("meta", "pt", "safetensors", PACKED)
RECIPE_VERSION = 1
TASK_SIZE = 256
_MOST_IN_TASK = 8192
_PROBE_THREADS = 8
_PROBE_CHUNK = 32
"""Files that a thread looks at before it reports; handing over single ones costs more than reading headers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides the bytes of a cache.

    >>> Recipe(processor="flux", max_pixels=1024 * 1024)
    """

    processor: str = "tiny"
    model_name: str | None = None
    """A folder in the diffusers layout or a hub name; None is the processor's default."""
    max_pixels: int = 256 * 256
    """The resolution budget; ``MultiTierBucketCalculator.RESOLUTION_PRESETS`` has names for some."""
    crop_mode: str = "center"
    caption_format: str = "auto"
    caption_field: str | None = None
    dtype: str = "auto"
    """What the model computes in; ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    output_format: str = "pt"
    stochastic: bool = False
    """Sample the VAE's posterior, with a seed per sample, instead of taking its mean."""
    seed: int = 42
    """For random crops and stochastic latents."""
    video: VideoChoices | None = None
    """Which frames of clips are taken; None is for images."""
    size: tuple[int, int] | None = None
    """(width, height) for every sample, instead of buckets under ``max_pixels``."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("crop_mode", self.crop_mode, (*CROP_MODES, NO_CROP)),
            ("caption_format", self.caption_format, CAPTION_FORMATS),
            ("dtype", self.dtype, DTYPES),
            ("output_format", self.output_format, OUTPUT_FORMATS),
        ):
            if value not in allowed:
                raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(allowed)}")
        for name, number in (("max_pixels", self.max_pixels), ("seed", self.seed)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ConfigError(f"{name} is {number!r}; it must be a whole number, 0 or more")


def recipe_fingerprint(recipe: Mapping[str, Any]) -> str:
    """Identifies a resolved recipe, as it is recorded in a cache."""
    return hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRecipe:
    """A recipe with nothing left open, as it is recorded in a cache."""

    recipe_version: int = RECIPE_VERSION
    processor: str
    processor_version: int
    weights: str
    """The identity of the model's weights."""
    max_pixels: int
    quantization: int
    crop_mode: str
    caption_format: str
    caption_field: str | None
    dtype: str
    output_format: str
    stochastic: bool
    seed: int
    frame_step: int
    video: VideoChoices | None
    size: tuple[int, int] | None

    @property
    def media(self) -> str:
        return "image" if self.video is None else "video"

    def medium(self) -> Medium:
        """What reads this recipe's inputs."""
        if self.video is None:
            return Images(self.crop_mode)
        return Videos(self.video, self.crop_mode, self.frame_step)

    @property
    def fingerprint(self) -> str:
        return recipe_fingerprint(asdict(self))

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """One line per field in which a recorded recipe differs from this one."""
        mine = json.loads(json.dumps(asdict(self)))
        names = sorted(
            set(mine) | set(other), key=lambda name: list(mine).index(name) if name in mine else 99
        )
        return [
            f"{n} was {other.get(n)!r}, now {mine.get(n)!r}" for n in names if mine.get(n) != other.get(n)
        ]


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
    medium: Medium,
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


BucketChooser = Callable[[Sequence[tuple[int, int]]], Sequence[tuple[int | None, tuple[int, int]]]]
"""Bucket id and (width, height) for each of some sizes."""


def bucket_chooser(recipe: ResolvedRecipe) -> BucketChooser:
    """Buckets under the recipe's budget, or its one size for all."""
    if recipe.size is not None:
        fixed: tuple[int | None, tuple[int, int]] = (None, recipe.size)
        return lambda sizes: [fixed] * len(sizes)
    calculator = MultiTierBucketCalculator(recipe.quantization, recipe.max_pixels)

    def choose(sizes: Sequence[tuple[int, int]]) -> list[tuple[int | None, tuple[int, int]]]:
        table = np.array(sizes, dtype=np.int64).reshape(-1, 2)
        ids = calculator.assign(table[:, 0], table[:, 1]).tolist()
        return [(number, calculator.get_bucket_by_id(number)["resolution"]) for number in ids]

    return choose


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
    medium: Medium,
    choose_buckets: BucketChooser,
    on_progress: Callable[[int], None],
) -> tuple[list[PlannedSample], list[Failure]]:
    def extent_or_reason(file: SourceFile) -> Extent | str:
        try:
            return medium.probe(root / file.name)
        except MediaError as error:
            return str(error)

    readable: list[tuple[SourceFile, Caption, Extent]] = []
    skipped = []

    def probe_all(part: Sequence[tuple[SourceFile, Caption]]) -> list[Extent | str]:
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
