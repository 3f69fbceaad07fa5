"""Is a finished cache what it says it is? Every file is opened and held against its row.

Present, readable, of the right shapes, finite, not constant, with the bytes that were written; and, if
asked, decoded again and compared with the picture or clip it came from.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from latentry.cache.checks import latent_problem, psnr_db
from latentry.cache.format import METADATA_NAME
from latentry.cache.index import open_index
from latentry.cache.read.samples import open_samples
from latentry.encode.recipe import ResolvedRecipe
from latentry.engines.local import find_devices
from latentry.errors import CacheError, ConfigError, MediaError
from latentry.media.reader import VideoOptions
from latentry.processors import PROCESSORS, Processor, processor_class
from latentry.seeds import derived_seed
from latentry.serve.dataset import BaseMultiresolutionDataset, TextToImageDataset, TextToVideoDataset
from latentry.storage import content_digest
from latentry.types import Caption, PlannedSample, SourceFile


@dataclass(frozen=True, slots=True)
class Problem:
    file: str
    what: str


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What was wrong, if anything."""

    cache_dir: Path
    num_samples: int
    problems: tuple[Problem, ...]
    psnr_db: Mapping[str, float] = field(default_factory=dict)
    """With decoding: file to decibels."""

    @property
    def exit_status(self) -> int:
        return 2 if self.problems else 0

    def to_dict(self) -> dict[str, Any]:
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
        lines.append(f"{self.num_samples} samples, {len(self.problems)} problems in {self.cache_dir}")
        return "\n".join(lines)


def verify_cache(
    cache_dir: str | os.PathLike[str],
    *,
    decode: bool = False,
    device: str = "auto",
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> VerifyResult:
    """Check every sample of a cache of any kind.

    >>> print(verify_cache("cache"))
    12 samples, 0 problems in cache

    ``decode`` loads the cache's model and compares each latent, decoded, with its source.
    """
    dataset = _open(Path(cache_dir).expanduser().absolute())
    decoder = _Decoder(dataset.cache_dir, find_devices(device)[0]) if decode else None
    problems: list[Problem] = []
    psnr: dict[str, float] = {}
    kinds = _Kinds()
    listed = set()
    for number, row in enumerate(dataset.metadata):
        name = os.path.relpath(dataset.samples.describe(number), dataset.cache_dir)
        found = [Problem(name, what) for what in _sample_problems(dataset, number, name, row, kinds)]
        try:
            listed.update(dataset.samples.files(number))
        except CacheError as error:
            found.append(Problem(name, str(error)))
        if decoder and not found:
            try:
                if content_digest(decoder.source_of(row)) != row["source_digest"]:
                    raise MediaError("has changed since; run the same command again to encode it anew")
                psnr[name] = decoder.psnr_db(dataset.samples.load(number), row)
            except (MediaError, OSError) as error:
                found.append(Problem(name, f"its source {decoder.source_of(row)} {error}"))
        problems += found
        on_progress(number + 1, len(dataset))
    problems += kinds.outliers()
    for path in sorted(dataset.cache_dir.glob("*x*/*")):
        relative = path.relative_to(dataset.cache_dir).as_posix()
        if path.is_file() and relative not in listed:
            problems.append(Problem(relative, "is in no row of the metadata"))
    return VerifyResult(
        cache_dir=dataset.cache_dir, num_samples=len(dataset), problems=tuple(problems), psnr_db=psnr
    )


def _open(cache_dir: Path) -> BaseMultiresolutionDataset:
    """The cache as the dataset of its kind, which its first readable file tells."""
    index = open_index(cache_dir, lambda _: "")
    samples = open_samples(cache_dir, index)
    for row in range(len(index)):
        try:
            if "video_latents" in samples.load(row):
                return TextToVideoDataset(cache_dir, model_type=index.metadata.model_type or "")
            break
        except CacheError:
            continue
    return TextToImageDataset(cache_dir)


def _sample_problems(
    dataset: BaseMultiresolutionDataset,
    number: int,
    name: str,
    row: Mapping[str, Any],
    kinds: _Kinds,
) -> Iterator[str]:
    try:
        item = dataset[number]
        data = dataset.samples.load(number)
    except CacheError as error:
        yield str(error).removeprefix(str(dataset.cache_dir / name)).lstrip(": ")
        return
    latents = item["latent"] if "latent" in item else item["video_latents"]
    if problem := latent_problem(latents):
        yield problem
    for key, value in data.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
            yield f"{key} holds NaN or infinite values"
    for key in ("prompt", "bucket_id", "num_frames", "model_type"):
        if key in row and key in data and row[key] != data[key]:
            yield f"{key} is {data[key]!r}, but its row says {row[key]!r}"
    kinds.note(name, data)
    yield from _clip_problems(data, row, dataset.index.metadata.processor)
    if "file_digest" in row and row["file_digest"] != content_digest(dataset.cache_dir / name):
        yield "its bytes are not those that were written: the checksum differs"


class _Kinds:
    """The dtypes and text shapes of a cache's tensors: what most files have, all must have."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))

    def note(self, relative: str, data: Mapping[str, Any]) -> None:
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                # Latents and first frames have their bucket's shape, which is checked elsewhere.
                bucketed = key in ("latent", "video_latents", "first_frame")
                kind = f"{value.dtype}" if bucketed else f"{value.dtype} {list(value.shape)}"
                self._files[key][kind].append(relative)

    def outliers(self) -> Iterator[Problem]:
        for key, kinds in self._files.items():
            usual = max(kinds, key=lambda kind: len(kinds[kind]))
            for kind in kinds.keys() - {usual}:
                for relative in kinds[kind]:
                    yield Problem(relative, f"{key} is {kind}, but {usual} in the cache's other files")


def _clip_problems(data: Mapping[str, Any], row: Mapping[str, Any], processor: str | None) -> Iterator[str]:
    """What is wrong with a clip's frames."""
    latents, num_frames = data.get("video_latents"), row.get("num_frames")
    if latents is not None and num_frames and processor in PROCESSORS:
        expected = (num_frames - 1) // processor_class(processor).info.temporal_factor + 1
        if latents.shape[2] != expected:
            yield f"video_latents have {latents.shape[2]} frames; {num_frames} frames make {expected}"
    width, height = row.get("bucket_resolution") or row["crop_resolution"]
    frame = data.get("first_frame")
    if frame is not None and list(frame.shape) != [height, width, 3]:
        yield f"first_frame has shape {list(frame.shape)}; the bucket is {width}x{height}"
    if frame is None and data.get("processing_mode") == "video":
        yield "has no first_frame, though it is a whole clip"


class _Decoder:
    """Decodes latents with the cache's own model, and reads their sources as its recipe did."""

    def __init__(self, cache_dir: Path, device: str) -> None:
        metadata = json.loads((cache_dir / METADATA_NAME).read_text(encoding="utf-8"))
        recipe = metadata.get("recipe")
        if not isinstance(recipe, dict):
            raise ConfigError(
                f"{cache_dir} was made by another tool and records no recipe; leave out --decode"
            )
        video = recipe.get("video")
        self._recipe = ResolvedRecipe(
            **{
                **recipe,
                "video": VideoOptions(**video) if video else None,
                "size": tuple(recipe["size"]) if recipe.get("size") else None,
            }
        )
        self._medium = self._recipe.media_reader()
        family = processor_class(self._recipe.processor)
        self._processor: Processor = family(
            metadata["model_name"], torch.device(device), getattr(torch, self._recipe.dtype)
        )

    def source_of(self, row: Mapping[str, Any]) -> Path:
        return Path(row.get("image_path") or row["video_path"])

    def psnr_db(self, data: Mapping[str, Any], row: Mapping[str, Any]) -> float:
        latents = data["latent"][None] if "latent" in data else data["video_latents"]
        restored = self._processor.decode_latents(latents)[0]
        sample = PlannedSample(
            SourceFile(row["source_name"], row["source_bytes"], row["source_modified_ns"]),
            Caption(row["prompt"], row["caption_source"]),
            width=row["original_resolution"][0],
            height=row["original_resolution"][1],
            bucket_id=row["bucket_id"],
            bucket=(row["bucket_resolution"][0], row["bucket_resolution"][1]),
            num_frames=row.get("num_frames"),
            number=row.get("frame_index", 0),
            num_samples=row.get("total_frames_extracted", 1),
        )
        seed = derived_seed(self._recipe.seed, "crop", row["source_name"])
        (cut,) = self._medium.read(self.source_of(row), [sample], seed)
        return psnr_db(cut.pixels, restored)
