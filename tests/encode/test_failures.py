"""Inputs that cannot be encoded, and arguments that cannot work."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial

import pytest
import torch
from helpers import PACKED, SMALL, rows_of, stopped_after

from latentry import Recipe, prepare
from latentry.cache.latent_checks import latent_problem
from latentry.encode.planning import tasks
from latentry.errors import ConfigError, RunError, TooManyFailuresError
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import assert_same_cache


def test_bad_files_are_reported_and_the_others_encoded(photos, tmp_path):
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


def test_only_bad_files(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("no")
    result = prepare(SMALL, image_dir=tmp_path / "photos", output_dir=tmp_path / "cache")
    assert (result.num_encoded, result.exit_status) == (0, 2)
    assert (tmp_path / "cache" / "failures.jsonl").exists()
    assert not (tmp_path / "cache" / "metadata.json").exists()


@pytest.mark.parametrize("recipe", [SMALL, PACKED], ids=["files", "packed"])
def test_too_many_failures_in_a_row_stop_the_run(photos, tmp_path, recipe):
    """What is finished is kept, and ``failures.jsonl`` says what failed."""
    whole = (photos / "space" / "astronaut.jpg").read_bytes()
    for i in range(5):
        (photos / f"broken_{i}.jpg").write_bytes(whole[:20_000])
    (photos / "empty.jpg").touch()
    cache = tmp_path / "cache"
    encoded = []

    def count(progress):
        if progress.phase == "encode":
            encoded.append(progress.done - progress.failures)

    with pytest.raises(TooManyFailuresError, match=r"3 inputs in a row failed.*--max_failures"):
        prepare(recipe, image_dir=photos, output_dir=cache, max_failures=3, on_progress=count)
    lines = [json.loads(line)["name"] for line in (cache / "failures.jsonl").read_text().splitlines()]
    assert lines == ["broken_0.jpg", "broken_1.jpg", "broken_2.jpg", "empty.jpg"]
    assert encoded[-1] > 0
    unlimited = prepare(recipe, image_dir=photos, output_dir=cache, max_failures=0)
    assert unlimited.num_already_done == encoded[-1]
    assert unlimited.num_encoded == 12 - encoded[-1]
    assert len(unlimited.failures) == 6
    assert len(list(TextToImageDataset(cache))) == 12
    prepare(recipe, image_dir=photos, output_dir=tmp_path / "undisturbed", max_failures=0)
    assert_same_cache(cache, tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"image_dir": "missing"}, ConfigError, "missing does not exist"),
        ({"image_dir": "empty"}, ConfigError, "holds no images"),
        ({"image_dir": "file"}, ConfigError, "is a file, not a folder"),
        ({"output_dir": "file/cache"}, RunError, "cannot write to"),
        ({"batch_size": 0}, ConfigError, "batch_size is 0"),
        ({"devices": "gpu"}, ConfigError, "unknown device 'gpu'"),
        ({"devices": "cuda:7"}, ConfigError, "there is no device 'cuda:7'"),
        ({"recipe": Recipe(processor="nothing")}, ConfigError, "unknown processor 'nothing'"),
        ({"recipe": Recipe(max_pixels=100)}, ConfigError, "max_pixels is 100"),
    ],
)
def test_impossible_arguments_are_refused_and_leave_nothing(photos, tmp_path, change, error, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    options = {"recipe": SMALL, "image_dir": photos, "output_dir": tmp_path / "cache"}
    for key, value in change.items():
        options[key] = tmp_path / value if key.endswith("_dir") else value
    with pytest.raises(error, match=says):
        prepare(options.pop("recipe"), **options)
    assert not (tmp_path / "cache").exists()


def test_recipe_names_the_allowed_values():
    for options, says in (
        ({"crop_mode": "left"}, "crop_mode 'left'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"output_format": "zip"}, "output_format 'zip'"),
        ({"caption_format": "xml"}, "caption_format 'xml'"),
        ({"max_pixels": -1}, "max_pixels is -1"),
    ):
        with pytest.raises(ConfigError, match=says):
            Recipe(**options)


def test_input_that_now_fails_is_removed_from_the_cache(photos, tmp_path):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    victim = photos / "space" / "astronaut.jpg"
    victim.write_bytes(victim.read_bytes()[:30_000])
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    assert [failure.name for failure in result.failures] == ["space/astronaut.jpg"]
    assert len(rows_of(tmp_path / "cache")) == sum(result.buckets.values()) == 11


def test_retried_failures_do_not_count_as_failures_in_a_row(photos, tmp_path, monkeypatch):
    run = partial(prepare, SMALL, image_dir=photos, max_failures=3)
    monkeypatch.setattr(tasks, "TASK_SIZE", 4)
    whole = (photos / "space" / "astronaut.jpg").read_bytes()
    for i in range(6):
        (photos / f"{i}_a_good.jpg").write_bytes(whole)
        (photos / f"{i}_broken.jpg").write_bytes(whole[:20_000])
    first = run(output_dir=tmp_path / "cache")
    assert len(first.failures) == 6
    (photos / "new.jpg").write_bytes(whole)
    second = run(output_dir=tmp_path / "cache")
    assert (second.num_encoded, len(second.failures)) == (1, 6)
    with pytest.raises(KeyboardInterrupt):
        run(output_dir=tmp_path / "stopped", on_progress=stopped_after(12))
    resumed = run(output_dir=tmp_path / "stopped")
    assert len(resumed.failures) == 6


def test_unusual_names_links_and_captions(photos, tmp_path):
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
        "bad [small].png": "is empty",
        "caf\\udce9.jpg": "has a name that is not valid UTF-8; rename it",
        "dangling.jpg": "is a broken link",
        "pipe.png": "is not a regular file",
    }
    assert "bad [small].png" in str(result)
    assert len(result.caption_problems) == 2
    assert len(list(TextToImageDataset(tmp_path / "cache"))) == 18


def test_unusable_latents_are_failures():
    assert "NaN" in latent_problem(torch.tensor([1.0, float("nan")]))
    assert "infinite" in latent_problem(torch.tensor([1.0, float("inf")]).half())
    assert "constant" in latent_problem(torch.full((16, 4, 4), 0.5))
    assert latent_problem(torch.randn(16, 4, 4)) is None


def test_nan_latents_and_captions_stop_the_run(photos, tmp_path, monkeypatch):
    from latentry.processors.tiny import TinyProcessor

    for path in list(photos.rglob("*.jpg"))[:1]:
        for i in range(20):
            shutil.copy(path, path.with_name(f"copy_{i:03d}.jpg"))
    with monkeypatch.context() as patch:
        encode = TinyProcessor.encode_pixels
        patch.setattr(TinyProcessor, "encode_pixels", lambda self, *a: encode(self, *a) * float("nan"))
        with pytest.raises(RunError, match=r"15 inputs in a row failed.*has a latent with NaN"):
            prepare(SMALL, image_dir=photos, output_dir=tmp_path / "latents", max_failures=15)
    texts = TinyProcessor.encode_texts

    def one_bad(self, captions):
        columns = texts(self, captions)
        columns["prompt_embeds"][[i for i, text in enumerate(captions) if "rocket" in text]] = float("nan")
        return columns

    monkeypatch.setattr(TinyProcessor, "encode_texts", one_bad)
    result = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "texts")
    assert {failure.reason for failure in result.failures} == {
        "has a caption whose embedding contains NaN or infinite values; try --dtype float32"
    }
    assert len(result.failures) == 2
