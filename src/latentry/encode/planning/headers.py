"""What the headers of inputs say, and the bucket that each sample gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import numpy as np

from latentry.buckets import MultiTierBucketCalculator
from latentry.encode.resolved_recipe import ResolvedRecipe
from latentry.errors import MediaError, UnsuitableMediaError
from latentry.media.reader import MediaReader, ProbeResult
from latentry.sources.folder import SourceFolders
from latentry.types import Bucket, Caption, Failure, PlannedSample, SourceFile

_PROBE_THREADS = 8
_PROBE_CHUNK = 32
"""Files per call in a thread. Submitting single files costs more than reading their headers."""

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


@dataclass(frozen=True, slots=True)
class Headers:
    """What the headers of files say."""

    samples: list[PlannedSample]
    failures: list[Failure]
    """Files that cannot be used."""
    unsuitable: frozenset[str]
    """The names of those among them that are whole, but that the options leave out."""
    notes: Counter[str]
    """How often each note about how files are read occurs."""


def read_headers(
    files: Sequence[tuple[SourceFile, Caption]],
    source: SourceFolders,
    reader: MediaReader,
    choose_buckets: BucketChooser,
    on_progress: Callable[[int, int], None],
) -> Headers:
    """Read the files' headers in threads, and choose buckets for all of them at once.

    ``on_progress`` gets the number of files that are read and of those that failed.
    """

    def probe_one(file: SourceFile) -> ProbeResult | MediaError:
        try:
            return reader.probe(source.path(file.name))
        except MediaError as error:
            return error
        except OSError as error:
            return MediaError(f"cannot be read: {error.strerror}")

    def probe_all(part: Sequence[tuple[SourceFile, Caption]]) -> list[ProbeResult | MediaError]:
        return [probe_one(file) for file, _ in part]

    readable: list[tuple[SourceFile, Caption, ProbeResult]] = []
    failures: list[Failure] = []
    unsuitable: set[str] = set()
    size = min(_PROBE_CHUNK, max(1, len(files) // (4 * _PROBE_THREADS)))
    parts = [files[i : i + size] for i in range(0, len(files), size)]
    with ThreadPoolExecutor(_PROBE_THREADS) as pool:
        try:
            results = chain.from_iterable(pool.map(probe_all, parts))
            for count, ((file, caption), probed) in enumerate(zip(files, results, strict=True), start=1):
                if isinstance(probed, MediaError):
                    failures.append(Failure(file.name, str(probed)))
                    if isinstance(probed, UnsuitableMediaError):
                        unsuitable.add(file.name)
                else:
                    readable.append((file, caption, probed))
                on_progress(count, len(failures))
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
    notes = Counter(note for *_, probed in readable for note in probed.notes)
    return Headers(samples, failures, frozenset(unsuitable), notes)
