"""Whole runs: a folder becomes a cache, and later runs add to it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import SMALL, files_of, rows_of
from PIL import Image

import latentry
from latentry import Recipe, prepare
from latentry.encode.prepare import Progress
from latentry.errors import RunError
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import assert_same_cache


def test_folder_to_cache_to_batches(photos, tmp_path):
    seen: list[Progress] = []
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", on_progress=seen.append)
    assert (result.num_encoded, result.num_already_done, result.failures, result.exit_status) == (
        12,
        0,
        (),
        0,
    )
    assert dict(result.captions) == {"jsonl": 3, "file name": 5, "sidecar": 2, "txt": 2}
    assert [p.done for p in seen if p.phase == "encode"] == list(range(1, 13))
    assert "12 encoded" in str(result)
    assert result._repr_html_().startswith("<pre>")
    assert json.dumps(result.to_dict())

    loader, _ = latentry.build_text_to_image_multiresolution_dataloader(
        cache_dir=tmp_path / "cache", batch_size=2, drop_last=False, num_workers=0
    )
    prompts = [prompt for batch in loader for prompt in batch["metadata"]["prompts"]]
    assert len(prompts) == 12
    assert "a tabby cat looking at the camera" in prompts
    assert "rocket sideways" in prompts
    assert not (tmp_path / "cache" / ".latentry").exists()
    assert not (tmp_path / "cache" / "failures.jsonl").exists()


def test_cache_layout_is_as_documented(photos, tmp_path):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", shard_size=5)
    metadata = json.loads((tmp_path / "cache" / "metadata.json").read_text())
    assert metadata["processor"] == metadata["model_type"] == "tiny"
    assert (metadata["total_items"], metadata["num_shards"], metadata["shard_size"]) == (12, 3, 5)
    assert metadata["shards"] == [f"metadata_shard_000{i}.json" for i in range(3)]
    assert metadata["recipe"]["max_pixels"] == 128 * 128
    assert len(metadata["fingerprint"]) == 32
    for row in rows_of(tmp_path / "cache"):
        path = Path(row["cache_file"])
        width, height = row["bucket_resolution"]
        assert path.is_absolute()
        assert path.parent == tmp_path / "cache" / f"{width}x{height}"
        data = torch.load(path, weights_only=True)
        assert next(iter(data)) == "latent"
        assert data["latent"].shape == (16, height // 8, width // 8)
        assert data["latent"].untyped_storage().nbytes() == data["latent"].numel() * 2, (
            "not a view of its batch"
        )
        assert row["pixels"] == width * height
        assert row["aspect_ratio"] == data["aspect_ratio"] == width / height
        for key in ("image_path", "prompt", "bucket_id", "model_type"):
            assert row[key] == data[key]
        for key in ("original_resolution", "bucket_resolution"):
            assert row[key] == list(data[key])
        assert Path(row["image_path"]).is_file()
    sideways = next(row for row in rows_of(tmp_path / "cache") if "sideways" in row["image_path"])
    assert sideways["original_resolution"] == [210, 427], "as shown, not as stored"


@pytest.mark.parametrize("output_format", ["meta", "pt", "safetensors"])
def test_every_format_reads_back_the_same_data(photos, tmp_path, output_format):
    recipe = Recipe(max_pixels=128 * 128, output_format=output_format)
    prepare(recipe, image_dir=photos, output_dir=tmp_path / output_format, max_files=3)
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "reference", max_files=3)
    for mine, reference in zip(
        TextToImageDataset(tmp_path / output_format), TextToImageDataset(tmp_path / "reference"), strict=True
    ):
        assert mine["cache_file"].endswith(output_format)
        for key in reference.keys() - {"cache_file"}:
            equal = torch.equal if isinstance(mine[key], torch.Tensor) else lambda a, b: a == b
            assert equal(mine[key], reference[key]), key


def test_flux_cache_equals_its_pipeline(photos, tmp_path, flux_folder):
    from diffusers import FluxImg2ImgPipeline

    recipe = Recipe(processor="flux", model_name=str(flux_folder), max_pixels=128 * 128)
    prepare(recipe, image_dir=photos, output_dir=tmp_path / "cache")
    pipeline = FluxImg2ImgPipeline.from_pretrained(flux_folder, transformer=None)
    from latentry.media.images import decode_image, fit_to_bucket

    for item in TextToImageDataset(tmp_path / "cache"):
        bucket = tuple(item["crop_resolution"].tolist())
        pixels, offset = fit_to_bucket(decode_image(Path(item["image_path"]).read_bytes()).pixels, bucket)
        assert item["crop_offset"].tolist() == list(offset)
        picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        with torch.no_grad():
            mode = pipeline.vae.encode(pipeline.image_processor.preprocess(picture)).latent_dist.mode()
            embeds, pooled, _ = pipeline.encode_prompt(item["prompt"], prompt_2=None)
        latent = (mode - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
        assert torch.equal(item["latent"], latent[0].half())
        assert torch.equal(item["prompt_embeds"], embeds[0].bfloat16())
        assert torch.equal(item["pooled_prompt_embeds"], pooled[0].bfloat16())


def test_moved_cache_opens_and_grows(photos, tmp_path):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", max_files=5)
    moved = (tmp_path / "cache").rename(tmp_path / "elsewhere")
    assert len(list(TextToImageDataset(moved))) == 5
    result = prepare(SMALL, image_dir=photos, output_dir=moved)
    assert (result.num_already_done, result.num_encoded) == (5, 7)
    assert all(Path(row["cache_file"]).is_file() for row in rows_of(moved))


def test_verify_measures_every_sample(photos, tmp_path):
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "verified", verify=True)
    assert len(result.psnr_db) == 12
    assert all(value > 22 for _, value in result.psnr_db.values())
    assert "lowest PSNR" in str(result)
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "plain")
    assert_same_cache(tmp_path / "verified", tmp_path / "plain")


def test_crop_mode_and_seed_change_the_cache(photos, tmp_path):
    def offsets(name, **options):
        prepare(Recipe(max_pixels=128 * 128, **options), image_dir=photos, output_dir=tmp_path / name)
        return [tuple(item["crop_offset"].tolist()) for item in TextToImageDataset(tmp_path / name)]

    first = offsets("a", crop_mode="random", seed=1)
    assert offsets("b", crop_mode="random", seed=1) == first
    assert_same_cache(tmp_path / "a", tmp_path / "b")
    assert offsets("c", crop_mode="random", seed=2) != first
    assert offsets("d", crop_mode="smart") != offsets("e")


def test_only_changed_inputs_are_encoded_again(photos, tmp_path):
    cache = tmp_path / "cache"
    prepare(SMALL, image_dir=photos, output_dir=cache)
    before = files_of(cache)

    again = prepare(SMALL, image_dir=photos, output_dir=cache)
    assert (again.num_encoded, again.num_already_done) == (0, 12)
    assert files_of(cache) == before

    os.utime(photos / "home" / "coffee.png", (1, 1))  # a newer time, the same content
    shutil.copy(photos / "home" / "chelsea.jpg", photos / "another_cat.jpg")  # a new file
    (photos / "space" / "astronaut_portrait.txt").write_text("another caption")
    shutil.copy(photos / "textures" / "retina.jpg", photos / "textures" / "brick_wall.jpg")  # other content
    (photos / "home" / "moving_clock.png").unlink()
    result = prepare(SMALL, image_dir=photos, output_dir=cache)
    assert (result.num_encoded, result.num_already_done, result.num_removed) == (3, 9, 1)
    rows = {row["source_name"]: row for row in rows_of(cache)}
    assert len(rows) == 12
    assert rows["space/astronaut_portrait.jpg"]["prompt"] == "another caption"
    assert "home/moving_clock.png" not in rows
    kept = [name for name in files_of(cache) if name in before]
    assert len(kept) == 9
    assert all(files_of(cache)[name] == before[name] for name in kept)
    assert len(files_of(cache)) == 12

    fresh = tmp_path / "fresh"
    prepare(SMALL, image_dir=photos, output_dir=fresh)
    for row in rows_of(fresh):  # the coffee's row keeps the time it was encoded at
        row_here = rows[row["source_name"]]
        assert Path(row["cache_file"]).read_bytes() == Path(row_here["cache_file"]).read_bytes()


def test_max_files_removes_nothing(photos, tmp_path):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", max_files=2)
    assert (result.num_already_done, result.num_removed) == (2, 0)
    assert len(rows_of(tmp_path / "cache")) == 12


def test_other_recipe_is_refused_with_both_values(photos, tmp_path):
    cache = tmp_path / "cache"
    prepare(SMALL, image_dir=photos, output_dir=cache, max_files=2)
    before = files_of(cache)
    other = Recipe(max_pixels=192 * 192, crop_mode="smart")
    with pytest.raises(
        RunError, match=r"max_pixels was 16384, now 36864; crop_mode was 'center', now 'smart'"
    ):
        prepare(other, image_dir=photos, output_dir=cache)
    assert files_of(cache) == before
    (cache / "notes.md").write_text("mine")
    result = prepare(other, image_dir=photos, output_dir=cache, max_files=2, overwrite=True)
    assert result.num_encoded == 2
    assert not set(files_of(cache)) & set(before)
    assert (cache / "notes.md").read_text() == "mine"


def test_cache_of_another_folder_or_tool_is_refused(photos, tmp_path, nemo_image_cache):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    (tmp_path / "others").mkdir()
    shutil.copy(photos / "home" / "chelsea.jpg", tmp_path / "others" / "x.jpg")
    with pytest.raises(RunError, match="none of the 12 samples"):
        prepare(SMALL, image_dir=tmp_path / "others", output_dir=tmp_path / "cache")
    assert len(rows_of(tmp_path / "cache")) == 12
    with pytest.raises(RunError, match="a cache of another tool"):
        prepare(SMALL, image_dir=photos, output_dir=nemo_image_cache)
    assert len(TextToImageDataset(nemo_image_cache)) == 6


def test_dry_run_writes_nothing(photos, tmp_path):
    (photos / "bad.jpg").write_text("no")
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", dry_run=True)
    assert (result.num_encoded, len(result.failures)) == (12, 1)
    assert sum(result.buckets.values()) == 12
    assert not (tmp_path / "cache").exists()
    assert "12 would be encoded" in str(result)


def test_output_inside_input(photos):
    for _ in range(2):
        result = prepare(SMALL, image_dir=photos, output_dir=photos / "cache")
        assert result.num_encoded + result.num_already_done == 12


def test_inputs_dated_before_1970_are_done_once(photos, tmp_path):
    for path in photos.rglob("*.jpg"):
        os.utime(path, (-3600, -3600))
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", max_files=3)
    assert (result.num_encoded, result.num_already_done) == (0, 3)
    assert len(rows_of(tmp_path / "cache")) == 12
