"""Tests that need a GPU, and are skipped without one. ``docs/benchmarks.md`` says when they last ran."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import EXAMPLES, FUSED_ENCODERS, stopped_after
from PIL import Image

from latentry import Recipe, prepare
from latentry.encode.planning import tasks
from latentry.media.video_options import VideoOptions
from latentry.processors import processor_class
from latentry.processors.flux import FluxProcessor
from latentry.processors.fused.self_check import checked_encoder
from latentry.processors.memory import plan
from latentry.serve.config import build_text_to_image_multiresolution_dataloader
from latentry.testing import assert_same_cache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CAPTIONS = ["a cat", 'a video of waves crashing on the beach at sunset, "camera" panning slowly', ""]
CLOSE = {torch.float32: 0.01, torch.bfloat16: 0.04}
"""The largest allowed distance from a CPU in float32, relative to the norm. Convolutions in float32 use TF32."""


@pytest.fixture
def photos(tmp_path) -> Path:
    """Eight copies of the example images."""
    for i in range(8):
        shutil.copytree(EXAMPLES, tmp_path / "photos" / str(i))
    return tmp_path / "photos"


def distance(mine: torch.Tensor, reference: torch.Tensor) -> float:
    mine, reference = mine.double().cpu(), reference.double().cpu()
    return float((mine - reference).norm() / reference.norm().clamp(min=1e-9))


def noise(family: str, seed: int) -> torch.Tensor:
    size = (4, 3, 64, 96) if family == "flux" else (1, 3, 9, 64, 96)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUSED_ENCODERS)
def test_fused_encoders_pass_their_self_check(name, dtype, load_model, caplog):
    model = load_model(name, dtype).to("cuda:0")
    assert checked_encoder(FUSED_ENCODERS[name], model) is not None, caplog.text


@pytest.mark.parametrize("family", ["flux", "wan", "hunyuan"])
def test_processors_on_a_gpu_use_fused_encoders(family, model_folder, caplog):
    processor = processor_class(family)(str(model_folder(family)), torch.device("cuda:0"), torch.bfloat16)
    fused = [processor._encoder._fused]
    fused += [part for name, part in vars(processor).items() if name.startswith("_fused")]
    assert len(fused) == {"flux": 3, "wan": 2, "hunyuan": 1}[family]
    assert None not in fused, caplog.text


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("family", ["flux", "wan", "hunyuan"])
def test_a_gpu_matches_a_cpu_with_and_without_cuda_graphs(family, dtype, model_folder):
    folder = str(model_folder(family))
    on_cpu = processor_class(family)(folder, torch.device("cpu"), torch.float32)
    on_gpu = processor_class(family)(folder, torch.device("cuda:0"), dtype)
    for seed in (0, 1):
        pixels, expected = noise(family, seed), on_cpu.encode_pixels(noise(family, seed), None)
        # The third call captures a CUDA graph; it and later calls replay it.
        found = [on_gpu.encode_pixels(pixels, None).cpu() for _ in range(5)]
        assert distance(found[0], expected) < CLOSE[dtype]
        assert all(torch.equal(latents, found[0]) for latents in found)
    expected = on_cpu.encode_texts(CAPTIONS)
    first = on_gpu.encode_texts(CAPTIONS)
    for _ in range(5):
        for key, column in on_gpu.encode_texts(CAPTIONS).items():
            assert distance(column, expected[key]) < CLOSE[dtype], key
            assert torch.equal(column, first[key]), key


def flux_recipe(folder: Path, side: int, output_format: str = "meta") -> Recipe:
    return Recipe(
        processor="flux",
        model_name=str(folder),
        max_pixels=side**2,
        dtype="bfloat16",
        output_format=output_format,
    )


@pytest.mark.parametrize("output_format", ["pt", "packed"])
def test_an_interrupted_run_resumes_to_the_same_cache(
    output_format, photos, tmp_path, flux_folder, monkeypatch
):
    for name in ("TASK_SIZE", "_MAX_TASK_SIZE"):
        monkeypatch.setattr(tasks, name, 8)
    recipe = flux_recipe(flux_folder, 256, output_format)
    options = {"image_dir": photos, "devices": "cuda:0", "device_memory": "20GB"}
    prepare(recipe, output_dir=tmp_path / "undisturbed", **options)
    for count in (5, 20, 40):
        with pytest.raises(KeyboardInterrupt):
            prepare(recipe, output_dir=tmp_path / "cache", on_progress=stopped_after(count), **options)
    result = prepare(recipe, output_dir=tmp_path / "cache", **options)
    assert 0 < result.num_already_done < 96
    assert result.num_already_done + result.num_encoded == 96
    assert_same_cache(tmp_path / "cache", tmp_path / "undisturbed")


def test_two_workers_write_the_same_cache_as_one(photos, tmp_path, flux_folder):
    for name, devices in (("one", "cuda:0"), ("two", "cuda:0,cuda:0")):
        prepare(
            flux_recipe(flux_folder, 256),
            image_dir=photos,
            output_dir=tmp_path / name,
            devices=devices,
            device_memory="20GB",
        )
    assert_same_cache(tmp_path / "one", tmp_path / "two")


@pytest.fixture
def little_memory():
    """Call it to limit the device memory of this process to a number of bytes."""

    def allow(num_bytes: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(num_bytes / total)

    yield allow
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def nothing_reserved(monkeypatch):
    """Tiny models need little: plan without the gigabyte that models of real size have at least."""
    for name in ("RESERVED_BYTES", "LEAST_PIXEL_BYTES"):
        monkeypatch.setattr(plan, name, 0)


def test_a_smaller_plan_is_made_when_memory_runs_out(
    tmp_path, flux_folder, little_memory, nothing_reserved, caplog, monkeypatch
):
    """The budget is larger than what the allocator gives, as if another program had taken memory since."""
    sizes: list[int] = []
    encode_pixels = FluxProcessor._encode_pixels

    def watched(self, pixels, seeds):
        sizes.append(len(pixels))
        return encode_pixels(self, pixels, seeds)

    monkeypatch.setattr(FluxProcessor, "_encode_pixels", watched)
    (tmp_path / "images").mkdir()
    for i in range(64):
        pixels = np.random.default_rng(i).integers(0, 256, (512, 512, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png", compress_level=0)
    options = {"image_dir": tmp_path / "images", "devices": "cuda:0", "batch_size": 64}
    recipe = flux_recipe(flux_folder, 512)
    torch.cuda.reset_peak_memory_stats()
    prepare(recipe, output_dir=tmp_path / "whole", **options)
    assert sizes == [64]
    sizes.clear()
    little_memory(torch.cuda.max_memory_allocated() * 6 // 10)
    monkeypatch.setattr("latentry.encode.device_budget.available_memory", lambda device: 30e9)
    prepare(recipe, output_dir=tmp_path / "smaller", **options)
    assert sizes[0] == 64
    assert sizes[-1] < 64
    assert "the device ran out of memory: encoding continues with" in caplog.text
    assert "in tiles" not in caplog.text, sizes
    paths = list((tmp_path / "whole").glob("*x*/*.meta"))
    assert len(paths) == 64
    for path in paths:
        mine = torch.load(tmp_path / "smaller" / path.relative_to(tmp_path / "whole"), weights_only=True)
        assert distance(mine["latent"], torch.load(path, weights_only=True)["latent"]) < 0.02


def test_clips_that_do_not_fit_are_encoded_in_tiles(
    tmp_path, wan_folder, little_memory, nothing_reserved, caplog
):
    clips = Path(shutil.copytree(EXAMPLES.parent / "clips", tmp_path / "clips"))
    video = VideoOptions(target_frames=49, short_clips="pad")
    recipe = Recipe(
        processor="wan", model_name=str(wan_folder), size=(1280, 768), dtype="float32", video=video
    )
    little_memory(1 << 31)
    result = prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache", devices="cuda:0")
    assert result.num_encoded > 0
    assert not result.failures
    assert "in tiles" in caplog.text


def test_loaded_batches_are_on_the_device(image_cache):
    options = {"cache_dir": image_cache, "batch_size": 4, "seed": 1}
    on_gpu, _ = build_text_to_image_multiresolution_dataloader(device="cuda", pin_memory=True, **options)
    on_cpu, _ = build_text_to_image_multiresolution_dataloader(pin_memory=False, num_workers=0, **options)
    for mine, reference in zip(on_gpu, on_cpu, strict=True):
        for key in ("image_latents", "text_embeddings"):
            assert mine[key].is_cuda
            assert torch.equal(mine[key].cpu(), reference[key]), key
