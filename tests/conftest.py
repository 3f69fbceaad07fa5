"""Shared fixtures: the golden files, caches another tool wrote, and small caches of our own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from latentry.buckets import MultiTierBucketCalculator
from latentry.conversion import convert_cache
from latentry.preparation import Progress
from latentry.testing import make_flux_pipeline, make_hunyuan_pipeline, make_image_cache, make_wan_pipeline

os.environ["HF_HUB_OFFLINE"] = "1"

DATA = Path(__file__).parent / "data"
EXAMPLES = Path(__file__).parents[1] / "examples" / "pictures"


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


@pytest.fixture
def nemo_image_cache(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "nemo_caches" / "image_flux", tmp_path / "moved" / "image"))


@pytest.fixture
def nemo_video_cache(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "nemo_caches" / "video_wan", tmp_path / "moved" / "video"))


@pytest.fixture(scope="session")
def image_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """29 images in three buckets, over four shards."""
    folder = tmp_path_factory.mktemp("image_cache")
    return make_image_cache(folder, {(256, 256): 13, (320, 192): 9, (192, 320): 7}, shard_size=8)


@pytest.fixture(scope="session")
def flux_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random FLUX.1 in the diffusers layout."""
    return make_flux_pipeline(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="session")
def wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Wan 2.1."""
    return make_wan_pipeline(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="session")
def hunyuan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random HunyuanVideo 1.5, with SigLIP."""
    return make_hunyuan_pipeline(tmp_path_factory.mktemp("hunyuan"))


@pytest.fixture
def both(tmp_path) -> tuple[Path, Path]:
    """The same samples, in files of their own and packed."""
    files = make_image_cache(tmp_path / "files", {(256, 256): 13, (320, 192): 9, (192, 320): 7}, shard_size=8)
    convert_cache(files, tmp_path / "packed")
    return files, tmp_path / "packed"
