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
from pathlib import Path
from typing import Any

import numpy as np

from latentry.buckets import CROP_MODES, MultiTierBucketCalculator
from latentry.captions import CAPTION_FORMATS, CaptionFinder
from latentry.errors import ConfigError, MediaError
from latentry.media.images import probe_image
from latentry.records import Caption, Failure, PlannedSample, SourceFile, Task

DTYPES = ("auto", "float32", "float16", "bfloat16")
OUTPUT_FORMATS = ("meta", "pt", "safetensors")
RECIPE_VERSION = 1
TASK_SIZE = 256
_PROBE_THREADS = 8


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

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("crop_mode", self.crop_mode, CROP_MODES),
            ("caption_format", self.caption_format, CAPTION_FORMATS),
            ("dtype", self.dtype, DTYPES),
            ("output_format", self.output_format, OUTPUT_FORMATS),
        ):
            if value not in allowed:
                raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(allowed)}")
        for name, number in (("max_pixels", self.max_pixels), ("seed", self.seed)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ConfigError(f"{name} is {number!r}; it must be a whole number, 0 or more")


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

    @property
    def fingerprint(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """One line per field in which a recorded recipe differs from this one."""
        mine = asdict(self)
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
    """Name to row, for inputs that the cache holds unchanged."""
    skipped: tuple[Failure, ...]
    """Inputs whose headers already say that they cannot be encoded."""
    order: tuple[str, ...]
    """All input names, in the order that rows will have."""
    vanished: tuple[str, ...]
    """Inputs of the cache that the source no longer has."""
    captions: Counter[str] = field(default_factory=Counter)
    caption_problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_to_encode(self) -> int:
        return sum(len(task.samples) for task in self.tasks)

    def buckets(self) -> dict[tuple[int, int], int]:
        """Samples per bucket once the plan is carried out, smallest bucket first."""
        counts: Counter[tuple[int, int]] = Counter()
        for task in self.tasks:
            counts[task.bucket] += len(task.samples)
        for row in self.done.values():
            width, height = row["bucket_resolution"]
            counts[width, height] += 1
        return dict(sorted(counts.items(), key=lambda item: (item[0][0] * item[0][1], item[0])))


def make_plan(
    files: Sequence[SourceFile],
    root: Path,
    calculator: MultiTierBucketCalculator,
    finder: CaptionFinder,
    *,
    known: Mapping[str, Mapping[str, Any]],
    failed_before: Iterable[str] = (),
    on_progress: Callable[[int], None] = lambda _: None,
) -> Plan:
    """Decide every file's fate. ``known`` are the rows that the cache has, by source name."""
    done: dict[str, Mapping[str, Any]] = {}
    waiting: list[tuple[SourceFile, Caption]] = []
    for file in files:
        caption = finder.find(file.name)
        row = known.get(file.name)
        if row is not None and row["prompt"] == caption.text and _unchanged(row, file, root):
            done[file.name] = row
        else:
            waiting.append((file, caption))
    samples, skipped = _probe(waiting, root, calculator, on_progress)
    names = {file.name for file in files}
    return Plan(
        tasks=tuple(_cut(samples, frozenset(failed_before))),
        done=done,
        skipped=tuple(skipped),
        order=tuple(file.name for file in files),
        vanished=tuple(name for name in known if name not in names and not (root / name).exists()),
        captions=finder.counts,
        caption_problems=finder.problems,
    )


def _unchanged(row: Mapping[str, Any], file: SourceFile, root: Path) -> bool:
    """Same size and time, or, where only the time differs, the same content."""
    if row["source_bytes"] != file.size_bytes:
        return False
    if row["source_modified_ns"] == file.modified_ns:
        return True
    try:
        return bool(row["source_digest"] == content_digest((root / file.name).read_bytes()))
    except OSError:
        return False


def content_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _probe(
    waiting: Sequence[tuple[SourceFile, Caption]],
    root: Path,
    calculator: MultiTierBucketCalculator,
    on_progress: Callable[[int], None],
) -> tuple[list[PlannedSample], list[Failure]]:
    def size_or_reason(file: SourceFile) -> tuple[int, int] | str:
        try:
            return probe_image(root / file.name)
        except MediaError as error:
            return str(error)

    readable: list[tuple[SourceFile, Caption, tuple[int, int]]] = []
    skipped = []
    with ThreadPoolExecutor(_PROBE_THREADS) as pool:
        probed = pool.map(size_or_reason, (file for file, _ in waiting), chunksize=16)
        for count, ((file, caption), size) in enumerate(zip(waiting, probed, strict=True), start=1):
            if isinstance(size, str):
                skipped.append(Failure(file.name, size))
            else:
                readable.append((file, caption, size))
            on_progress(count)
    sizes = np.array([size for *_, size in readable], dtype=np.int64).reshape(-1, 2)
    ids = calculator.assign(sizes[:, 0], sizes[:, 1])
    return [
        PlannedSample(file, caption, *size, bucket_id, calculator.get_bucket_by_id(bucket_id)["resolution"])
        for (file, caption, size), bucket_id in zip(readable, ids.tolist(), strict=True)
    ], skipped


def _cut(samples: Iterable[PlannedSample], failed_before: frozenset[str]) -> Iterable[Task]:
    """Tasks of one bucket each; what failed before comes last and apart, so that it shifts no batch."""
    groups: dict[tuple[bool, tuple[int, int]], list[PlannedSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.file.name in failed_before, sample.bucket].append(sample)
    for again, bucket in sorted(groups, key=lambda key: (key[0], key[1][0] * key[1][1], key[1])):
        group = groups[again, bucket]
        for start in range(0, len(group), TASK_SIZE):
            part = tuple(group[start : start + TASK_SIZE])
            text = "\n".join([f"{bucket[0]}x{bucket[1]}", *(f"{s.file} {s.caption}" for s in part)])
            yield Task(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), bucket, part)
