"""Shared fixtures: caches another tool wrote, small caches of our own, tiny models."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers import DATA, EXAMPLES
from hypothesis import HealthCheck, settings

from latentry.cache.convert import convert_cache
from latentry.testing import make_flux_pipeline, make_hunyuan_pipeline, make_image_cache, make_wan_pipeline

os.environ["HF_HUB_OFFLINE"] = "1"
# Tests must pass on a busy machine, so no property test is timed.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


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


@pytest.fixture
def photos(tmp_path) -> Path:
    """The example pictures, in their folders, with their captions."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "photos"))
