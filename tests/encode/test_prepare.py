"""Folders of real pictures become caches: whole, resumed, added to, and refused where that is right."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import EXAMPLES, stopped_after
from PIL import Image

import latentry
from latentry import Recipe, prepare
from latentry.cache.checks import latent_problem
from latentry.encode import plan
from latentry.encode.device import feeding_a_gpu
from latentry.encode.pipeline import TaskRunner, _is_due
from latentry.encode.prepare import Progress
from latentry.engines import local
from latentry.errors import ConfigError, MetadataError, RunError
from latentry.media.reader import ImageReader
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import assert_same_cache

SMALL = Recipe(max_pixels=128 * 128)


@pytest.fixture
def photos(tmp_path) -> Path:
    """The example pictures, in their folders, with their captions."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "photos"))


def rows_of(cache: Path) -> list[dict]:
    shards = json.loads((cache / "metadata.json").read_text())["shards"]
    return [row for shard in shards for row in json.loads((cache / shard).read_text())]


def files_of(cache: Path) -> dict[str, int]:
    return {p.relative_to(cache).as_posix(): p.stat().st_mtime_ns for p in cache.glob("*x*/*")}


# ---- a whole run ----------------------------------------------------------------------------


def test_a_folder_becomes_a_cache_that_trains(photos, tmp_path):
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


def test_the_cache_is_as_documented(photos, tmp_path):
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
def test_every_format_reads_back_the_same(photos, tmp_path, output_format):
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


def test_flux_from_a_folder_equals_its_pipeline(photos, tmp_path, flux_folder):
    from diffusers import FluxImg2ImgPipeline

    recipe = Recipe(processor="flux", model_name=str(flux_folder), max_pixels=128 * 128)
    prepare(recipe, image_dir=photos, output_dir=tmp_path / "cache")
    pipeline = FluxImg2ImgPipeline.from_pretrained(flux_folder, transformer=None)
    from latentry.media.images import decode_image, fit_to_bucket

    for item in TextToImageDataset(tmp_path / "cache"):
        bucket = tuple(item["crop_resolution"].tolist())
        pixels, offset = fit_to_bucket(decode_image(Path(item["image_path"]).read_bytes()), bucket)
        assert item["crop_offset"].tolist() == list(offset)
        picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        with torch.no_grad():
            mode = pipeline.vae.encode(pipeline.image_processor.preprocess(picture)).latent_dist.mode()
            embeds, pooled, _ = pipeline.encode_prompt(item["prompt"], prompt_2=None)
        latent = (mode - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
        assert torch.equal(item["latent"], latent[0].half())
        assert torch.equal(item["prompt_embeds"], embeds[0].bfloat16())
        assert torch.equal(item["pooled_prompt_embeds"], pooled[0].bfloat16())


def test_a_moved_cache_opens_and_is_added_to(photos, tmp_path):
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
    assert "worst restored" in str(result)
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "plain")
    assert_same_cache(tmp_path / "verified", tmp_path / "plain")


def test_useless_latents_are_failures():
    assert "NaN" in latent_problem(torch.tensor([1.0, float("nan")]))
    assert "infinite" in latent_problem(torch.tensor([1.0, float("inf")]).half())
    assert "constant" in latent_problem(torch.full((16, 4, 4), 0.5))
    assert latent_problem(torch.randn(16, 4, 4)) is None


def test_crop_modes_and_seeds_decide_the_cache(photos, tmp_path):
    def offsets(name, **options):
        prepare(Recipe(max_pixels=128 * 128, **options), image_dir=photos, output_dir=tmp_path / name)
        return [tuple(item["crop_offset"].tolist()) for item in TextToImageDataset(tmp_path / name)]

    first = offsets("a", crop_mode="random", seed=1)
    assert offsets("b", crop_mode="random", seed=1) == first
    assert_same_cache(tmp_path / "a", tmp_path / "b")
    assert offsets("c", crop_mode="random", seed=2) != first
    assert offsets("d", crop_mode="smart") != offsets("e")


# ---- failures -------------------------------------------------------------------------------


def test_bad_files_are_named_and_stop_nothing(photos, tmp_path):
    (photos / "empty.jpg").write_bytes(b"")
    (photos / "text.png").write_text("not a picture")
    whole = (photos / "space" / "astronaut.jpg").read_bytes()
    (photos / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    assert (result.num_encoded, len(result.failures), result.exit_status) == (12, 3, 2)
    lines = [json.loads(line) for line in (tmp_path / "cache" / "failures.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["cut.jpg", "empty.jpg", "text.png"]
    assert all(line["reason"] for line in lines)
    assert len(rows_of(tmp_path / "cache")) == 12

    shutil.copy(photos / "space" / "astronaut.jpg", photos / "cut.jpg")
    (photos / "empty.jpg").unlink()
    (photos / "text.png").unlink()
    mended = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    assert (mended.num_encoded, mended.num_already_done, mended.exit_status) == (1, 12, 0)
    assert not (tmp_path / "cache" / "failures.jsonl").exists()


def test_nothing_but_bad_files(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("no")
    result = prepare(SMALL, image_dir=tmp_path / "photos", output_dir=tmp_path / "cache")
    assert (result.num_encoded, result.exit_status) == (0, 2)
    assert (tmp_path / "cache" / "failures.jsonl").exists()
    assert not (tmp_path / "cache" / "metadata.json").exists()


def test_too_many_failures_in_a_row_stop_the_run(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("latentry.encode.pipeline.MAX_FAILURES_IN_A_ROW", 3)
    whole = (photos / "space" / "astronaut.jpg").read_bytes()
    for i in range(4):
        (photos / f"broken_{i}.jpg").write_bytes(whole[:20_000])
    with pytest.raises(RunError, match="3 inputs in a row failed"):
        prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"image_dir": "missing"}, ConfigError, "missing does not exist"),
        ({"image_dir": "empty"}, ConfigError, "holds no media"),
        ({"image_dir": "file"}, ConfigError, "is a file, not a folder"),
        ({"output_dir": "file/cache"}, RunError, "cannot be written to"),
        ({"batch_size": 0}, ConfigError, "batch_size is 0"),
        ({"devices": "gpu"}, ConfigError, "device 'gpu' is none"),
        ({"devices": "cuda:7"}, ConfigError, "no device cuda:7"),
        ({"recipe": Recipe(processor="nothing")}, ConfigError, "unknown processor 'nothing'"),
        ({"recipe": Recipe(max_pixels=100)}, ConfigError, "max_pixels is 100"),
    ],
)
def test_what_cannot_work_is_refused_and_leaves_nothing(photos, tmp_path, change, error, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    options = {"recipe": SMALL, "image_dir": photos, "output_dir": tmp_path / "cache"}
    for key, value in change.items():
        options[key] = tmp_path / value if key.endswith("_dir") else value
    with pytest.raises(error, match=says):
        prepare(options.pop("recipe"), **options)
    assert not (tmp_path / "cache").exists()


def test_a_recipe_says_what_is_allowed():
    for options, says in (
        ({"crop_mode": "left"}, "crop_mode 'left'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"output_format": "zip"}, "output_format 'zip'"),
        ({"caption_format": "csv"}, "caption_format 'csv'"),
        ({"max_pixels": -1}, "max_pixels is -1"),
    ):
        with pytest.raises(ConfigError, match=says):
            Recipe(**options)


# ---- increments -----------------------------------------------------------------------------


def test_only_what_changed_is_encoded_again(photos, tmp_path):
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


def test_taking_fewer_images_removes_none(photos, tmp_path):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", max_files=2)
    assert (result.num_already_done, result.num_removed) == (2, 0)
    assert len(rows_of(tmp_path / "cache")) == 12


def test_another_recipe_is_refused_with_both_values(photos, tmp_path):
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


def test_another_folder_or_another_tools_cache_is_refused(photos, tmp_path, nemo_image_cache):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    (tmp_path / "others").mkdir()
    shutil.copy(photos / "home" / "chelsea.jpg", tmp_path / "others" / "x.jpg")
    with pytest.raises(RunError, match="none of the 12 samples"):
        prepare(SMALL, image_dir=tmp_path / "others", output_dir=tmp_path / "cache")
    assert len(rows_of(tmp_path / "cache")) == 12
    with pytest.raises(RunError, match="a cache of another tool"):
        prepare(SMALL, image_dir=photos, output_dir=nemo_image_cache)
    assert len(TextToImageDataset(nemo_image_cache)) == 6


def test_a_dry_run_shows_the_plan_and_writes_nothing(photos, tmp_path):
    (photos / "bad.jpg").write_text("no")
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", dry_run=True)
    assert (result.num_encoded, len(result.failures)) == (12, 1)
    assert sum(result.buckets.values()) == 12
    assert not (tmp_path / "cache").exists()
    assert "12 would be encoded" in str(result)


def test_the_output_may_lie_inside_the_input(photos):
    for _ in range(2):
        result = prepare(SMALL, image_dir=photos, output_dir=photos / "cache")
        assert result.num_encoded + result.num_already_done == 12


# ---- stopped runs ---------------------------------------------------------------------------

COMMAND = """
import sys
from latentry import Recipe, prepare
from latentry.encode import plan
plan.TASK_SIZE = 2
result = prepare(Recipe(max_pixels=128 * 128), image_dir=sys.argv[1], output_dir=sys.argv[2], shard_size=5,
                 devices=sys.argv[3])
sys.exit(result.exit_status)
"""


def start(photos: Path, cache: Path, devices: str = "cpu") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(photos), str(cache), devices],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[bytes]) -> int:
    _, errors = process.communicate(timeout=120)
    assert process.returncode in (0, 2), errors.decode()
    return process.returncode


@pytest.fixture
def undisturbed(photos, tmp_path, monkeypatch) -> Path:
    (photos / "broken.jpg").write_bytes((photos / "space" / "astronaut.jpg").read_bytes()[:20_000])
    monkeypatch.setattr(plan, "TASK_SIZE", 2)
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "undisturbed", shard_size=5)
    return tmp_path / "undisturbed"


@pytest.mark.slow
def test_killed_at_random_points_the_cache_is_that_of_an_undisturbed_run(photos, tmp_path, undisturbed):
    rng = random.Random(0)
    cache = tmp_path / "cache"
    kills = 0
    for _ in range(12):
        process = start(photos, cache)
        # From the first commit on there is something to lose; importing takes the seconds before.
        while process.poll() is None and not (cache / ".latentry").exists():
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.5))
        if process.poll() is not None:
            process.communicate()
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
    assert kills >= 1
    assert finish(start(photos, cache)) == 2
    assert_same_cache(cache, undisturbed)


def test_interrupted_after_each_task_it_goes_on(photos, tmp_path, undisturbed, monkeypatch):
    """Every single commit is a point to go on from, and no committed task is done twice."""
    monkeypatch.setattr(plan, "TASK_SIZE", 2)
    cache = tmp_path / "cache"
    encoded = []
    while True:
        mine: list[str] = []

        def stop_soon(progress, mine=mine):
            if progress.phase == "encode":
                mine.append("sample")
                if len(mine) > 3:
                    raise KeyboardInterrupt

        try:
            result = prepare(SMALL, image_dir=photos, output_dir=cache, shard_size=5, on_progress=stop_soon)
        except KeyboardInterrupt:
            encoded.append(len(mine))
            assert len(encoded) < 20
            continue
        break
    assert len(encoded) >= 2
    assert result.num_already_done > 0
    assert_same_cache(cache, undisturbed)


def test_killed_while_finishing_no_row_is_lost(photos, tmp_path, undisturbed, monkeypatch):
    """Until metadata.json is replaced, the earlier cache opens as it was; then, the new one does."""
    from latentry.cache.write.workspace import Workspace

    cache = tmp_path / "cache"
    prepare(SMALL, image_dir=photos, output_dir=cache, shard_size=5, max_files=7)
    earlier = len(TextToImageDataset(cache))
    write, interruptions = Workspace._write_text, 0
    for allowed in range(20):

        def write_some(self, path, text, budget=[allowed]):  # noqa: B006 - one per pass
            if path.parent == cache:
                budget[0] -= 1
                if budget[0] < 0:
                    raise KeyboardInterrupt
            write(self, path, text)

        monkeypatch.setattr(Workspace, "_write_text", write_some)
        try:
            result = prepare(SMALL, image_dir=photos, output_dir=cache, shard_size=5)
            break
        except KeyboardInterrupt:
            interruptions += 1
            assert len(TextToImageDataset(cache)) in (earlier, 12)
    assert interruptions >= 4
    assert result.num_already_done == 12
    assert [row["source_name"] for row in rows_of(cache)] == [
        row["source_name"] for row in rows_of(undisturbed)
    ]
    assert len(list(TextToImageDataset(cache))) == 12
    assert len(files_of(cache)) == 12


def test_what_changed_between_a_stop_and_going_on_is_encoded_anew(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "TASK_SIZE", 2)
    cache = tmp_path / "cache"
    for attempt in range(3):
        with pytest.raises(KeyboardInterrupt):
            prepare(SMALL, image_dir=photos, output_dir=cache, on_progress=stopped_after(4))
        for name in ("space/astronaut_portrait", "space/rocket_sideways", "home/chelsea"):
            (photos / f"{name}.txt").write_text(f"caption {attempt}")
    prepare(SMALL, image_dir=photos, output_dir=cache)
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "fresh")
    assert_same_cache(cache, tmp_path / "fresh")
    prompts = {row["source_name"]: row["prompt"] for row in rows_of(cache)}
    assert prompts["space/rocket_sideways.jpg"] == "caption 2"


def test_an_input_that_now_fails_leaves_the_cache(photos, tmp_path):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    victim = photos / "space" / "astronaut.jpg"
    victim.write_bytes(victim.read_bytes()[:30_000])
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    assert [failure.name for failure in result.failures] == ["space/astronaut.jpg"]
    assert len(rows_of(tmp_path / "cache")) == sum(result.buckets.values()) == 11


def test_scattered_failures_do_not_add_up_when_tried_again(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("latentry.encode.pipeline.MAX_FAILURES_IN_A_ROW", 3)
    monkeypatch.setattr(plan, "TASK_SIZE", 4)
    whole = (photos / "space" / "astronaut.jpg").read_bytes()
    for i in range(6):
        (photos / f"{i}_a_good.jpg").write_bytes(whole)
        (photos / f"{i}_broken.jpg").write_bytes(whole[:20_000])
    first = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    assert len(first.failures) == 6
    (photos / "new.jpg").write_bytes(whole)
    second = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    assert (second.num_encoded, len(second.failures)) == (1, 6)
    with pytest.raises(KeyboardInterrupt):
        prepare(SMALL, image_dir=photos, output_dir=tmp_path / "stopped", on_progress=stopped_after(12))
    resumed = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "stopped")
    assert len(resumed.failures) == 6


def test_overwriting_keeps_the_old_cache_until_the_new_one_is_there(photos, tmp_path):
    cache = tmp_path / "cache"
    prepare(SMALL, image_dir=photos, output_dir=cache)
    other = Recipe(max_pixels=192 * 192)
    with pytest.raises(ConfigError, match="stochastic"):
        prepare(Recipe(stochastic=True), image_dir=photos, output_dir=cache, overwrite=True)
    assert len(list(TextToImageDataset(cache))) == 12
    with pytest.raises(KeyboardInterrupt):
        prepare(other, image_dir=photos, output_dir=cache, overwrite=True, on_progress=stopped_after(8))
    assert len(list(TextToImageDataset(cache))) == 12, "the old one still opens"
    result = prepare(other, image_dir=photos, output_dir=cache, overwrite=True)
    assert result.num_already_done > 0, "an interrupted overwrite goes on"
    prepare(other, image_dir=photos, output_dir=tmp_path / "fresh")
    assert_same_cache_but_shard_names(cache, tmp_path / "fresh")
    again = prepare(other, image_dir=photos, output_dir=cache, overwrite=True)
    assert again.num_encoded == 12, "a new overwrite starts over"


def assert_same_cache_but_shard_names(first: Path, second: Path) -> None:
    assert set(files_of(first)) == set(files_of(second))
    assert [{**row, "cache_file": ""} for row in rows_of(first)] == [
        {**row, "cache_file": ""} for row in rows_of(second)
    ]


def test_a_damaged_cache_file_is_noticed(photos, tmp_path):
    cache = tmp_path / "cache"
    prepare(SMALL, image_dir=photos, output_dir=cache)
    emptied, flipped = sorted(cache.glob("*x*/*.pt"))[:2]
    emptied.write_bytes(b"")
    assert prepare(SMALL, image_dir=photos, output_dir=cache).num_encoded == 1
    content = bytearray(flipped.read_bytes())
    content[-9] ^= 1
    flipped.write_bytes(content)
    assert prepare(SMALL, image_dir=photos, output_dir=cache).num_encoded == 0, "its size is right"
    assert prepare(SMALL, image_dir=photos, output_dir=cache, verify=True).num_encoded == 1


def test_odd_names_links_and_captions(photos, tmp_path):
    whole = (photos / "space" / "astronaut.jpg").read_bytes()
    (photos / "x[").mkdir()
    for name in ("with [brackets].jpg", "x[/b].jpg", "new\nline.jpg", "-dash.JPG", "ünï.jpeg"):
        (photos / name).write_bytes(whole)
    (photos / "bad [small].png").write_bytes(b"")
    (photos / "dangling.jpg").symlink_to("nowhere")
    os.mkfifo(photos / "pipe.png")
    (photos / "loop").symlink_to(photos)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "linked.jpg").write_bytes(whole)
    (photos / "link").symlink_to(tmp_path / "elsewhere")
    with open(os.fsencode(photos) + b"/caf\xe9.jpg", "wb") as file:
        file.write(whole)
    (photos / "-dash.json").write_text('{"caption": "half a character \\ud83d"}')
    (photos / "x[/b].json").write_text("[" * 100_000)
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    assert result.num_encoded == 12 + 5 + 1
    assert {f.name: f.reason.split(":")[0] for f in result.failures} == {
        "bad [small].png": "is not an image, or its format is unknown",
        "caf\\udce9.jpg": "its name is not valid UTF-8; rename it",
        "dangling.jpg": "is a broken link",
        "pipe.png": "is not a regular file",
    }
    assert "bad [small].png" in str(result)
    assert len(result.caption_problems) == 2
    assert len(list(TextToImageDataset(tmp_path / "cache"))) == 18


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: next((c / ".latentry" / "commits").iterdir()).write_text("{}"),
        lambda c: next((c / ".latentry" / "commits").iterdir()).write_text('{"rows": [1], "failures": []}'),
        lambda c: (c / ".latentry" / "recipe.json").write_text("{"),
        lambda c: (c / "metadata.json").write_text('{"shards": [5]}'),
        lambda c: (c / "metadata.json").write_text('{"shards": [], "format_version": 99, "recipe": {}}'),
    ],
)
def test_damaged_state_is_one_line(photos, tmp_path, monkeypatch, damage):
    monkeypatch.setattr(plan, "TASK_SIZE", 2)
    with pytest.raises(KeyboardInterrupt):
        prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", on_progress=stopped_after(4))
    damage(tmp_path / "cache")
    with pytest.raises((MetadataError, RunError), match=r"damaged|format_version 99") as raised:
        prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_workers_end_with_their_parent(photos, tmp_path):
    process = start(photos, tmp_path / "cache", devices="cpu,cpu")
    while not list((tmp_path / "cache").glob("*x*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 20
    while _group_alive(process.pid):
        assert time.monotonic() < deadline, "workers live on"
        time.sleep(0.1)


def _group_alive(group: int) -> bool:
    """Whether a process of this group still runs (a zombie does not)."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[2] == str(group) and fields[0] != "Z":
            return True
    return False


@pytest.mark.slow
def test_two_workers_make_the_same_cache(photos, tmp_path, undisturbed):
    assert finish(start(photos, tmp_path / "cache", devices="cpu,cpu")) == 2
    assert_same_cache(tmp_path / "cache", undisturbed)


@pytest.mark.slow
def test_a_second_run_into_the_same_folder_is_refused(photos, tmp_path):
    first = start(photos, tmp_path / "cache")
    try:
        while not (tmp_path / "cache" / ".latentry" / "lock").exists():
            assert first.poll() is None, first.communicate()
            time.sleep(0.01)
        os.kill(first.pid, signal.SIGSTOP)
        with pytest.raises(RunError, match=rf"another run \(process {first.pid}\) is writing to"):
            prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    finally:
        os.kill(first.pid, signal.SIGCONT)
        first.communicate(timeout=60)
    assert first.returncode == 0


# ---- the pipeline ---------------------------------------------------------------------------


def test_latents_and_texts_of_nan_stop_the_run_after_a_hundred(photos, tmp_path, monkeypatch):
    from latentry.processors.tiny import TinyProcessor

    for path in list(photos.rglob("*.jpg"))[:1]:
        for i in range(20):
            shutil.copy(path, path.with_name(f"copy_{i:03d}.jpg"))
    monkeypatch.setattr("latentry.encode.pipeline.MAX_FAILURES_IN_A_ROW", 15)
    with monkeypatch.context() as patch:
        encode = TinyProcessor.encode_pixels
        patch.setattr(TinyProcessor, "encode_pixels", lambda self, *a: encode(self, *a) * float("nan"))
        with pytest.raises(RunError, match=r"15 inputs in a row failed.*latent holds NaN"):
            prepare(SMALL, image_dir=photos, output_dir=tmp_path / "latents")
    texts = TinyProcessor.encode_texts

    def one_bad(self, captions):
        columns = texts(self, captions)
        columns["prompt_embeds"][[i for i, text in enumerate(captions) if "rocket" in text]] = float("nan")
        return columns

    monkeypatch.setattr(TinyProcessor, "encode_texts", one_bad)
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "texts")
    assert {failure.reason for failure in result.failures} == {
        "its caption's embedding holds NaN or infinite values; try --dtype float32"
    }
    assert len(result.failures) == 2


def test_captions_are_let_go_one_by_one(monkeypatch):
    from latentry.encode.caption_batches import CaptionBatches
    from latentry.processors.tiny import TinyProcessor
    from latentry.types import Caption, PlannedSample, SourceFile

    samples = [
        PlannedSample(SourceFile(f"{i}.jpg", 1, 1), Caption(f"number {i % 40}", "txt"), 64, 64, 0, (64, 64))
        for i in range(80)
    ]
    monkeypatch.setattr("latentry.encode.caption_batches._SMALL_BYTES", 64)
    texts = CaptionBatches(TinyProcessor("embedded", torch.device("cpu"), torch.float32), samples)
    for sample in samples[:40]:
        for field in texts.take(sample.caption.text).fields.values():
            assert field.untyped_storage().nbytes() <= max(field.nbytes, 64)
    assert len(texts._encoded) == 40
    for sample in samples[40:]:
        texts.drop(sample.caption.text)
    assert not texts._encoded


def test_feeding_a_gpu_leaves_python_and_torch_as_they_were():
    before = (torch.get_num_threads(), sys.getswitchinterval())
    inside = []

    @feeding_a_gpu()
    def stopped() -> None:
        inside.append((torch.get_num_threads(), sys.getswitchinterval() < before[1]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert inside == [(1, True)]
    assert (torch.get_num_threads(), sys.getswitchinterval()) == before


def test_the_end_of_a_task_takes_no_place_in_the_devices_queue():
    batch, end = SimpleNamespace(samples=[0]), SimpleNamespace(samples=None)
    for queued, due in (
        ([], False),
        ([batch, batch], False),
        ([batch, batch, batch], True),
        ([batch, batch, end], False),
        ([batch, batch, end, batch], True),
        ([batch, end, batch], False),
        ([end, batch], True),
    ):
        assert _is_due(queued, 2) == due, queued
        assert _is_due(queued, 0) == bool(queued), queued


def test_few_are_read_ahead_until_the_first_is_there(photos, tmp_path, monkeypatch):
    """Clips that are decoded beside the first make the device wait for it."""
    begun: list[object] = []
    ahead: list[int] = []
    batches = TaskRunner._batches

    class Readers:
        def submit(self, function, *arguments):
            begun.append(arguments)
            future = Future()
            future.set_result(function(*arguments))
            return future

    def watched(self, tasks, readers, writers):
        for number, batch in enumerate(batches(self, tasks, Readers(), writers)):
            ahead.append(len(begun) - number)
            yield batch

    monkeypatch.setattr(TaskRunner, "_batches", watched)
    monkeypatch.setattr(local, "num_cores", lambda: 4)
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", batch_size=1)
    assert ahead[0] == 2
    assert max(ahead) > 3


def test_readers_use_one_thread_each_and_the_caller_keeps_its_own():
    from latentry.encode.device import single_threads

    before = torch.get_num_threads()
    with single_threads(3) as pool:

        def work(_):
            torch.nn.functional.interpolate(torch.rand(1, 3, 256, 256), size=(64, 64), mode="bicubic")
            return torch.get_num_threads()

        assert list(pool.map(work, range(6))) == [1] * 6
    assert torch.get_num_threads() == before


def test_nothing_is_written_after_a_run_has_failed(photos, tmp_path, monkeypatch):
    from latentry.cache.write import writers as writer

    parts = writer.cache_file_parts

    def slow(*arguments):
        time.sleep(0.2)
        return parts(*arguments)

    monkeypatch.setattr(writer, "cache_file_parts", slow)

    def fail(progress):
        if progress.phase == "encode" and progress.done > 3:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", on_progress=fail)
    before = sorted((tmp_path / "cache").rglob("*"))
    time.sleep(0.6)
    assert sorted((tmp_path / "cache").rglob("*")) == before


def test_stopping_a_plan_does_not_wait_for_all_headers(tmp_path, monkeypatch):

    (tmp_path / "photos").mkdir()
    for i in range(2000):
        (tmp_path / "photos" / f"{i}.jpg").touch()
    probed = []
    monkeypatch.setattr(
        ImageReader,
        "probe",
        lambda self, path: (
            probed.append(path)
            or time.sleep(0.001)
            or (_ for _ in ()).throw(latentry.errors.MediaError("is odd"))
        ),
    )

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(SMALL, image_dir=tmp_path / "photos", output_dir=tmp_path / "cache", on_progress=stop)
    assert len(probed) < 1500


@pytest.mark.slow
def test_a_worker_that_is_killed_in_mid_report_is_noticed(photos, tmp_path):
    """With two workers on the CPU; the parent is slow, so that their reports pile up."""
    code = f"""
import os, signal, time
import multiprocessing
from latentry import Recipe, prepare
def slow(progress):
    if progress.phase == "encode":
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)
if __name__ == "__main__":
    prepare(Recipe(max_pixels=128 * 128), image_dir={str(photos)!r}, output_dir={str(tmp_path / "cache")!r}, devices="cpu,cpu", on_progress=slow)
"""
    script = tmp_path / "run.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert "died (exit code -9); what is committed is kept" in done.stderr
