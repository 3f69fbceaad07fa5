"""Checking a finished cache: every sample is loaded and compared with its row.

A sample must be present, readable, finite and not constant, have the right shapes, and consist of the bytes that were
written. ``encode.verify`` adds the comparison of decoded latents with their inputs.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from latentry.buckets import aspect_name
from latentry.cache.caption_keys import PROMPTS, caption_key, num_captions
from latentry.cache.format import Row, row_from_dict
from latentry.cache.index import CacheIndex, PackedIndex, open_index
from latentry.cache.index.rows import open_rows
from latentry.cache.latent_checks import latent_problem
from latentry.cache.read.checks import image_columns, video_columns
from latentry.cache.read.fields import IMAGE_FIELDS, IMAGE_TOKEN_FIELDS, VIDEO_FIELDS
from latentry.cache.read.samples import Samples, open_samples
from latentry.cache.read.tiled_latents import TiledLatents
from latentry.cache.read.warn_once import WarnOnce
from latentry.counted import counted
from latentry.errors import CacheError, MediaError
from latentry.storage import content_digest
from latentry.types import model_family

_IMAGE_CAPTION_FIELDS = (*IMAGE_FIELDS.of_captions, *IMAGE_TOKEN_FIELDS.of_captions)
_CACHE_FILE_SUFFIXES = (".meta", ".pt", ".safetensors")
LoadedSample = Mapping[str, Any]
"""What a cache file holds."""
Compare = Callable[[Row, LoadedSample], float]
"""Decodes a sample and returns its PSNR in decibels. Raises ``MediaError`` if the input cannot be compared."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with one file of a cache."""

    file: str
    what: str


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """The problems of a cache, if there are any."""

    cache_dir: Path
    num_samples: int
    problems: tuple[Problem, ...]
    psnr_db: Mapping[str, float] = field(default_factory=dict)
    """File to decibels, if latents were decoded."""

    @property
    def exit_status(self) -> int:
        """0 without problems, else 2."""
        return 2 if self.problems else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "cache_dir": str(self.cache_dir),
            "samples": self.num_samples,
            "problems": [{"file": problem.file, "what": problem.what} for problem in self.problems],
            "psnr_db": {name: round(value, 2) for name, value in self.psnr_db.items()},
            "exit_status": self.exit_status,
        }

    def __str__(self) -> str:
        lines = [f"{problem.file}: {problem.what}" for problem in self.problems]
        if self.psnr_db:
            worst = min(self.psnr_db, key=lambda name: self.psnr_db[name])
            mean = sum(self.psnr_db.values()) / len(self.psnr_db)
            lines.append(f"decoded: mean {mean:.1f} dB, worst {self.psnr_db[worst]:.1f} dB ({worst})")
        lines.append(
            f"{counted(self.num_samples, 'sample')}, {counted(len(self.problems), 'problem')} in {self.cache_dir}"
        )
        return "\n".join(lines)


def check_cache(
    cache_dir: Path,
    *,
    frame_step: int | None = None,
    compare: Compare | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> VerifyResult:
    """Check every sample of a cache.

    Args:
        cache_dir: A finished cache, written by Latentry or by NeMo AutoModel.
        frame_step: Frames per latent frame of the cache's model, if it is known.
        compare: Compares a decoded sample with its input; None leaves that out.
        on_progress: Called with the number of checked samples and the number of all samples.
    """
    index = open_index(cache_dir, aspect_name)
    checker = _Checker(cache_dir, index, frame_step)
    problems: list[Problem] = []
    psnr: dict[str, float] = {}
    checked: set[str] = set()
    num_repeats = 0
    for number, written in enumerate(open_rows(cache_dir, index)):
        name = checker.name(number)
        row = row_from_dict(written)
        if row.repeat and name in checked:
            num_repeats += 1
            on_progress(number + 1, len(index))
            continue
        checked.add(name)
        found = list(checker.problems(number, row, written))
        if compare is not None and not found:
            try:
                psnr[name] = compare(row, checker.load(number))
            except (MediaError, OSError) as error:
                found.append(f"its source {row.media_path} {error}")
        problems += [Problem(name, what) for what in found]
        on_progress(number + 1, len(index))
    problems += checker.unusual_tensors()
    problems += checker.unlisted_files()
    return VerifyResult(
        cache_dir=cache_dir,
        num_samples=len(index) - num_repeats,
        problems=tuple(problems),
        psnr_db=psnr,
    )


class _Checker:
    """Checks samples one by one, and remembers what has to be compared between them."""

    def __init__(self, cache_dir: Path, index: CacheIndex | PackedIndex, frame_step: int | None) -> None:
        self._cache_dir = cache_dir
        self._index = index
        self._frame_step = frame_step
        self._samples: Samples = open_samples(cache_dir, index)
        self._is_video = self._first_is_video()
        self._tiles = TiledLatents.of_cache(cache_dir, index.metadata, WarnOnce())
        self._listed: set[str] = set()
        self._types: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        """Tensor name to type to the files that have it."""

    def _first_is_video(self) -> bool:
        """Whether the first readable sample is a video."""
        for row in range(len(self._index)):
            try:
                return "video_latents" in self.load(row)
            except CacheError:
                continue
        return False

    def name(self, number: int) -> str:
        """The sample's file, relative to the cache."""
        return os.path.relpath(self._samples.describe(number), self._cache_dir)

    def load(self, number: int) -> LoadedSample:
        return self._samples.load(number)

    def problems(self, number: int, row: Row, written: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong with one sample."""
        name = self.name(number)
        try:
            self._listed.update(self._samples.files(number))
            data = self.load(number)
            self._check_as_served(number)
        except CacheError as error:
            yield str(error).removeprefix(str(self._cache_dir / name)).lstrip(": ")
            return
        if problem := latent_problem(data["video_latents" if self._is_video else "latent"]):
            yield problem
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                if value.is_floating_point() and not torch.isfinite(value).all():
                    yield f"{key} contains NaN or infinite values"
                self._types[key][_type_of(key, value)].append(name)
        for key in ("prompt", PROMPTS, "bucket_id", "num_frames", "model_type"):
            if key in written and key in data and _differ(key, written[key], data[key]):
                yield f"{key} is {data[key]!r}, but its row says {written[key]!r}"
        yield from self._caption_problems(data)
        yield from self._frame_problems(data, row)
        if row.file_digest and row.file_digest != content_digest(self._cache_dir / name):
            yield "its bytes are not those that were written: the checksum differs"

    def _check_as_served(self, number: int) -> None:
        """Raise an error if a dataset could not serve the sample."""
        buckets = [self._index.bucket(number)]
        if self._is_video:
            video_columns(self._samples.read([number], VIDEO_FIELDS), buckets, VIDEO_FIELDS, self._tiles)
        else:
            image_columns(self._samples.read([number], IMAGE_FIELDS), buckets, IMAGE_FIELDS)

    def _caption_problems(self, data: LoadedSample) -> Iterator[str]:
        """Tensors that further captions lack."""
        fields = VIDEO_FIELDS.of_captions if self._is_video else _IMAGE_CAPTION_FIELDS
        count = num_captions(data)
        for number in range(1, count):
            keys = (caption_key(found.name, number) for found in fields if found.name in data)
            for key in keys:
                if key not in data:
                    yield f"has {count} captions, but no {key}"

    def _frame_problems(self, data: LoadedSample, row: Row) -> Iterator[str]:
        latents = data.get("video_latents")
        if latents is not None and row.num_frames and self._frame_step:
            expected = (row.num_frames - 1) // self._frame_step + 1
            if latents.shape[2] != expected:
                yield f"video_latents have {latents.shape[2]} frames; {row.num_frames} frames make {expected}"
        width, height = row.bucket.resolution
        frame = data.get("first_frame")
        if frame is not None and list(frame.shape) != [height, width, 3]:
            yield f"first_frame has shape {list(frame.shape)}; the bucket is {width}x{height}"
        if frame is None and data.get("processing_mode") == "video":
            yield "has no first_frame, though it is a whole clip"

    def unusual_tensors(self) -> Iterator[Problem]:
        """Files whose tensors differ in dtype or shape from those of most other files."""
        for key, types in self._types.items():
            usual = max(types, key=lambda found: len(types[found]))
            for found in types.keys() - {usual}:
                for name in types[found]:
                    yield Problem(name, f"{key} is {found}, but {usual} in the cache's other files")

    def unlisted_files(self) -> Iterator[Problem]:
        """Cache files that no row names, in bucket folders and in the folders of listed files."""
        folders = {path.parent for path in self._cache_dir.glob("*x*/*")}
        folders |= {(self._cache_dir / file).parent for file in self._listed}
        for path in sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir()):
            relative = path.relative_to(self._cache_dir).as_posix()
            is_cache_file = path.parent != self._cache_dir or path.suffix in _CACHE_FILE_SUFFIXES
            if path.is_file() and is_cache_file and relative not in self._listed:
                yield Problem(relative, "is in no row of the metadata")


def _differ(key: str, written: Any, stored: Any) -> bool:
    if key == "model_type" and isinstance(written, str) and isinstance(stored, str):
        return model_family(written) != model_family(stored)
    return bool(written != stored)


_LENGTH_DIMS = {
    name: dim
    for field in (*IMAGE_FIELDS.text, *VIDEO_FIELDS.text)
    if field.padding is not None
    for name, dim in ((field.name, field.padding.dim), (field.padding.mask, -1))
}
"""Tensors whose length may differ between samples, and the dimension in which it does."""


def _type_of(key: str, tensor: torch.Tensor) -> str:
    """The dtype, and the shape without what may differ between samples."""
    if key in ("latent", "video_latents", "first_frame"):
        return f"{tensor.dtype}"
    shape: list[int | str] = list(tensor.shape)
    if key in _LENGTH_DIMS and len(shape) >= -_LENGTH_DIMS[key]:
        shape[_LENGTH_DIMS[key]] = "any"
    return f"{tensor.dtype} [{', '.join(map(str, shape))}]"
