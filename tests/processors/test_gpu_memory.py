"""Models of real size within 24, 16, 12 and 8 GB of device memory. Skipped without a GPU; about 60 GB of main memory.

Every run is compared with one that has the whole device. torch's allocator is limited to the budget, so a run that needs
more fails. The tests are in the order of the families, because the weights of one family at a time are in main memory.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_files import make_textured_clip, textured_frame
from helpers import rows_of, stopped_after
from PIL import Image

from latentry import LatentryError, Recipe, prepare
from latentry.encode.planning import tasks
from latentry.hardware import available_memory, memory_limit
from latentry.media.video_options import VideoOptions
from latentry.processors import PROCESSORS, processor_class
from latentry.report.summary import PrepareResult
from latentry.testing import assert_same_cache
from latentry.testing.full_size import forget_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda:0"
GB = 10**9
BUDGETS_GB = (24, 16, 12, 8)
CLOSE = 0.03
"""The largest allowed distance of latents from those of a run without a budget, relative to their norm."""
MAY_USE_TILES: set[tuple[str, int]] = set()
"""Families and budgets in GB that may encode in tiles."""
PROCESSOR_NAMES = {"flux": "RandomFlux", "wan": "RandomWan", "hunyuan": "RandomHunyuan"}
TEXT_FIELDS = {
    "flux": ("clip_tokens", "clip_hidden", "pooled_prompt_embeds", "t5_tokens", "prompt_embeds"),
    "wan": ("text_embeddings",),
    "hunyuan": ("text_embeddings", "text_mask", "text_embeddings_2", "text_mask_2"),
}
PIXEL_FIELDS = {"flux": ("latent",), "wan": ("video_latents",), "hunyuan": ("video_latents", "image_embeds")}
SIZES = {"flux": (1024, 1024), "wan": (832, 480), "hunyuan": (848, 480)}
NUM_PICTURES, NUM_CLIPS, NUM_FRAMES = 16, 2, 33
CAPTIONS = (
    "a cat",
    'a photo of an old wooden sign that says "open", waves crashing on the beach behind it, at sunset',
    "the quick brown fox jumps over the lazy dog, " * 6,
    "",
)


def make_pictures(folder: Path, size: tuple[int, int]) -> None:
    """Gradients with noise."""
    width, height = size
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    for number in range(NUM_PICTURES):
        noise = np.random.default_rng(number).normal(0, 20, (height, width, 3))
        pixels = np.stack([255 * x, 255 * y, np.full_like(x, 15 * number)], -1) + noise
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:02d}.jpg", quality=90)


def make_clips(folder: Path, size: tuple[int, int]) -> None:
    for number in range(NUM_CLIPS):
        first = 1000 * number
        make_textured_clip(
            folder / f"{number:02d}.mp4", NUM_FRAMES, frame=lambda i, first=first: textured_frame(first + i, *size)
        )  # fmt: skip


class Inputs:
    """The inputs of a family, and what its runs share."""

    def __init__(self, family: str, folder: Path) -> None:
        folder.mkdir()
        size = SIZES[family]
        name = f"random-{family}"
        PROCESSORS[name] = f"latentry.testing.full_size:{PROCESSOR_NAMES[family]}"
        if family == "flux":
            make_pictures(folder, size)
            self.where = {"image_dir": folder}
            self.recipe = Recipe(processor=name, dtype="bfloat16", max_pixels=size[0] * size[1])
        else:
            make_clips(folder, size)
            self.where = {"video_dir": folder}
            video = VideoOptions(target_frames=NUM_FRAMES)
            self.recipe = Recipe(processor=name, dtype="bfloat16", size=size, video=video)
        self.num_samples = len(list(folder.iterdir()))
        for number, path in enumerate(sorted(folder.iterdir())):
            caption = CAPTIONS[number % len(CAPTIONS)]
            path.with_suffix(".txt").write_text(f"{caption}, number {number}" if caption else "")

    def encode(self, output: Path, device_memory: int | None = None, **options) -> PrepareResult:
        """Encode all inputs, with the allocator limited to the budget."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.held_bytes = torch.cuda.memory_allocated()  # by cuBLAS, for example
        limit = math.inf
        if device_memory is not None:
            options["device_memory"] = device_memory
            limit = device_memory + 1  # for rounding: the allocator's limit is a fraction
        with memory_limit(DEVICE, limit):
            return prepare(self.recipe, output_dir=output, devices=DEVICE, **self.where, **options)


@pytest.fixture(scope="module")
def whole_device(tmp_path_factory) -> Callable[[str], tuple[Inputs, Path]]:
    """The inputs of a family, and the cache that a run without a budget makes of them."""
    made: dict[str, tuple[Inputs, Path]] = {}

    def make(family: str) -> tuple[Inputs, Path]:
        if family not in made:
            forget_weights()
            folder = tmp_path_factory.mktemp(family)
            inputs = Inputs(family, folder / "inputs")
            result = inputs.encode(folder / "cache")
            assert (result.num_encoded, result.failures) == (inputs.num_samples, ())
            made[family] = (inputs, folder / "cache")
        return made[family]

    yield make
    forget_weights()
    for name in PROCESSOR_NAMES:
        PROCESSORS.pop(f"random-{name}", None)


def samples_of(cache: Path) -> dict[str, dict]:
    """The content of each cache file, by the name of its input."""
    return {
        Path(row.get("image_path") or row["video_path"]).name: torch.load(
            row["cache_file"], weights_only=True
        )
        for row in rows_of(cache)
    }


def distance(mine: torch.Tensor, reference: torch.Tensor) -> float:
    mine, reference = mine.double(), reference.double()
    return float((mine - reference).norm() / reference.norm())


def test_a_resumed_run_with_the_same_budget_makes_the_same_bytes(whole_device, tmp_path, monkeypatch):
    inputs, _ = whole_device("flux")
    monkeypatch.setattr(tasks, "TASK_SIZE", 4)
    inputs.encode(tmp_path / "undisturbed", 12 * GB)
    for count in (3, 6):
        with pytest.raises(KeyboardInterrupt):
            inputs.encode(tmp_path / "cache", 12 * GB, on_progress=stopped_after(count))
    result = inputs.encode(tmp_path / "cache", 12 * GB)
    assert 0 < result.num_already_done < NUM_PICTURES
    assert result.num_already_done + result.num_encoded == NUM_PICTURES
    assert_same_cache(tmp_path / "cache", tmp_path / "undisturbed")


def test_many_batches_of_captions_in_one_pass_have_the_same_bits(whole_device):
    """Several loops over the layers: those without a place of their own are uploaded again in each."""
    whole_device("flux")
    captions = [f"{CAPTIONS[i % 3]}, number {i}" for i in range(96)]
    found = []
    for budget in (8 * GB, math.inf):
        processor = processor_class("random-flux")(
            "", torch.device(DEVICE), torch.bfloat16, device_memory=budget
        )
        with processor.text_pass():
            batches = [processor.encode_texts(captions[i : i + 32]) for i in range(0, 96, 32)]
        found.append([{key: column.cpu() for key, column in batch.items()} for batch in batches])
        del processor, batches
        torch.cuda.empty_cache()
    for streamed, whole in zip(*found, strict=True):
        for key, column in whole.items():
            assert torch.equal(streamed[key], column), key


@pytest.mark.parametrize(
    ("family", "budget_gb"), [(family, budget) for family in PROCESSOR_NAMES for budget in BUDGETS_GB]
)
def test_real_sizes_fit_into_a_budget(family, budget_gb, whole_device, tmp_path, caplog):
    if available_memory(DEVICE) < budget_gb * GB:
        pytest.skip(f"needs a GPU with {budget_gb} GB")
    inputs, whole = whole_device(family)
    caplog.clear()
    result = inputs.encode(tmp_path / "cache", budget_gb * GB)
    peak_bytes = torch.cuda.max_memory_reserved()
    assert (result.num_encoded, result.failures) == (inputs.num_samples, ())
    assert inputs.held_bytes < GB / 4, "an earlier run has not freed its memory"
    assert peak_bytes <= budget_gb * GB + inputs.held_bytes
    assert "tiles" not in caplog.text or (family, budget_gb) in MAY_USE_TILES, caplog.text
    assert "own modules" not in caplog.text, "a fused encoder is not in use"
    assert "ran out of memory" not in caplog.text, "the plan was too large"
    mine, reference = samples_of(tmp_path / "cache"), samples_of(whole)
    assert mine.keys() == reference.keys()
    for name, sample in mine.items():
        for key in TEXT_FIELDS[family]:
            assert torch.equal(sample[key], reference[name][key]), f"{key} of {name}"
        for key in PIXEL_FIELDS[family]:
            assert sample[key].shape == reference[name][key].shape
            assert distance(sample[key], reference[name][key]) < CLOSE, f"{key} of {name}"


@pytest.mark.parametrize("family", PROCESSOR_NAMES)
def test_decoding_fits_into_the_budget_too(family, whole_device, tmp_path):
    inputs, _ = whole_device(family)
    result = inputs.encode(tmp_path / "cache", 8 * GB, verify=True)
    assert torch.cuda.max_memory_reserved() <= 8 * GB
    assert (result.num_encoded, result.failures) == (inputs.num_samples, ())
    assert len(result.psnr_db) == inputs.num_samples


def test_a_budget_that_is_too_small_is_one_line(whole_device, tmp_path):
    inputs, _ = whole_device("hunyuan")
    with pytest.raises(LatentryError) as found:
        inputs.encode(tmp_path / "cache", 2 * GB)
    message = str(found.value)
    assert "GB" in message
    assert "\n" not in message
    # Nothing that a traceback would show in addition.
    assert found.value.__cause__ is None
    assert found.value.__suppress_context__ or found.value.__context__ is None
    assert not (tmp_path / "cache" / "metadata.json").exists()
