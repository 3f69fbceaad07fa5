"""Converting between one file per sample and shards, without loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import EXAMPLES, PACKED, SMALL, assert_same_batches, edit_json, run_main, shards_of

import latentry
from latentry import Recipe, prepare, verify_cache
from latentry.cache.convert import convert_cache
from latentry.cli import main
from latentry.errors import (
    CacheFileError,
    CacheNotFoundError,
    ConfigError,
    RunError,
)
from latentry.media.video_options import VideoOptions
from latentry.serve.dataset import TextToImageDataset, TextToVideoDataset
from latentry.testing import (
    assert_same_cache,
    make_counter_clip,
    make_image_cache,
    make_video_cache,
)

build_images = latentry.build_text_to_image_multiresolution_dataloader
build_videos = latentry.build_video_multiresolution_dataloader


@pytest.mark.parametrize("output_format", ["pt", "meta", "safetensors"])
def test_round_trip_gives_the_same_bytes(photos, tmp_path, output_format):
    files, cache, back = tmp_path / "files", tmp_path / "packed", tmp_path / "back"
    recipe = Recipe(max_pixels=128 * 128, output_format=output_format)
    prepare(recipe, image_dir=photos, output_dir=files, shard_size=5)
    convert_cache(files, cache)
    assert TextToImageDataset(cache).fingerprint == TextToImageDataset(files).fingerprint
    convert_cache(cache, back, output_format)
    assert_same_cache(back, files)
    again = prepare(recipe, image_dir=photos, output_dir=back, shard_size=5)
    assert (again.num_encoded, again.num_already_done) == (0, 12), "and it can be gone on with"
    added = prepare(PACKED, image_dir=photos, output_dir=cache)
    assert (added.num_encoded, added.num_already_done) == (0, 12)


def test_caches_of_nemo_are_packed_unchanged(nemo_image_cache, nemo_video_cache, tmp_path):
    for source, build, family in (
        (nemo_image_cache, build_images, TextToImageDataset),
        (nemo_video_cache, build_videos, TextToVideoDataset),
    ):
        cache, back = tmp_path / f"{source.name}_packed", tmp_path / f"{source.name}_back"
        convert_cache(source, cache)
        assert_same_batches(build, source, cache, batch_size=2, num_workers=0)
        first, second = family(source), family(cache)
        assert first.get_bucket_info() == second.get_bucket_info()
        assert first.sorted_bucket_keys == second.sorted_bucket_keys
        suffix = next(source.glob("*x*/*")).suffix
        convert_cache(cache, back, suffix.lstrip("."))
        for path in source.glob("*x*/*"):
            before, after = (
                torch.load(p, weights_only=True) for p in (path, back / path.relative_to(source))
            )
            assert list(before) == list(after)
            for key, value in before.items():
                assert type(value) is type(after[key]), key
                same = (
                    torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key]
                )
                assert same, key


def test_resume_of_a_conversion(tmp_path, monkeypatch):
    source = make_image_cache(tmp_path / "files", {(256, 256): 11, (320, 192): 7}, shard_size=5)
    monkeypatch.setattr("latentry.cache.convert.TARGET_SHARD_BYTES", 3 * 8192)
    convert_cache(source, tmp_path / "undisturbed")
    stops = 0
    while True:
        seen = []

        def stop(done, total, seen=seen, already=stops):
            seen.append(done)
            if len(seen) > already + 1:
                raise KeyboardInterrupt

        try:
            convert_cache(source, tmp_path / "packed", on_progress=stop)
            break
        except KeyboardInterrupt:
            stops += 1
            assert stops < 10
            with pytest.raises(CacheNotFoundError):
                TextToImageDataset(tmp_path / "packed")
    assert stops > 2
    assert_same_cache(tmp_path / "packed", tmp_path / "undisturbed")


def test_round_trip_of_videos(tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    make_counter_clip(clips / "a.mp4", 20, size=(96, 64))
    make_counter_clip(clips / "b.mp4", 20, size=(64, 96))
    for mode in ("video", "frames"):
        recipe = Recipe(max_pixels=64 * 64, output_format="meta", video=VideoOptions(mode=mode, num_frames=3))
        prepare(recipe, video_dir=clips, output_dir=tmp_path / mode)
        convert_cache(tmp_path / mode, tmp_path / f"{mode}_packed")
        assert verify_cache(tmp_path / f"{mode}_packed").exit_status == 0
        assert_same_batches(build_videos, tmp_path / mode, tmp_path / f"{mode}_packed", num_workers=0)
        convert_cache(tmp_path / f"{mode}_packed", tmp_path / f"{mode}_back", "meta")
        assert_same_cache(tmp_path / f"{mode}_back", tmp_path / mode)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("extra", [(1, 2)], r"extra is \[\(1, 2\)\], which packed cannot store"),
        ("extra", {"a": 1}, "which packed cannot store"),
        ("extra", float("nan"), "extra is nan"),
        ("extra", torch.zeros(2, dtype=torch.complex64), "a tensor of torch.complex64"),
        ("extra", torch.eye(2).to_sparse(), "sparse"),
        (3, 4, "a key that is not text"),
        ("latent", "none", "has neither latent nor video_latents"),
    ],
)
def test_values_that_would_be_lost_are_refused(tmp_path, key, value, says):
    source = make_image_cache(tmp_path / "files", {(256, 256): 2})
    path = next(source.glob("*x*/*"))
    torch.save({**torch.load(path, weights_only=True), key: value}, path)
    with pytest.raises(CacheFileError, match=says):
        convert_cache(source, tmp_path / "packed")


def test_types_of_numbers_survive(tmp_path):
    source = make_image_cache(tmp_path / "files", {(256, 256): 1})
    path = next(source.glob("*x*/*"))
    odd = {
        "aspect_ratio": 1,
        "bucket_id": True,
        "more": [1, "x", None],
        "fp8": torch.ones(2).to(torch.float8_e5m2),
    }
    torch.save({**torch.load(path, weights_only=True), **odd}, path)
    convert_cache(source, tmp_path / "packed")
    convert_cache(tmp_path / "packed", tmp_path / "back", "pt")
    back = torch.load(tmp_path / "back" / path.relative_to(source), weights_only=True)
    for name, value in odd.items():
        assert type(back[name]) is type(value), name
        assert (back[name] == value) if name != "fp8" else torch.equal(back[name].float(), value.float())


def test_two_samples_with_the_same_file_name_are_refused(tmp_path):
    source = make_image_cache(tmp_path / "files", {(256, 256): 2})
    rows = json.loads((source / "metadata_shard_0000.json").read_text())
    first, second = (Path(row["cache_file"]) for row in rows)
    second.rename(first.with_suffix(".meta"))
    rows[1]["cache_file"] = str(first.with_suffix(".meta"))
    (source / "metadata_shard_0000.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match="would be the file of two samples"):
        convert_cache(source, tmp_path / "pt", "pt")
    convert_cache(source, tmp_path / "packed")
    assert [TextToImageDataset(tmp_path / "packed")[i]["prompt"] for i in (0, 1)] == ["sample 0", "sample 1"]


def test_missing_committed_shard_is_written_again(tmp_path, monkeypatch):
    source = make_image_cache(tmp_path / "files", {(256, 256): 6})
    monkeypatch.setattr("latentry.cache.convert.TARGET_SHARD_BYTES", 2 * 8192)

    def stop(done, total):
        if done > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_cache(source, tmp_path / "packed", on_progress=stop)
    with pytest.raises(RunError, match="unfinished conversion; finish it first"):
        prepare(PACKED, image_dir=EXAMPLES, output_dir=tmp_path / "packed")
    shards_of(tmp_path / "packed", "latents")[0].unlink()
    convert_cache(source, tmp_path / "packed")
    assert verify_cache(tmp_path / "packed").exit_status == 0


def test_impossible_conversions_are_refused(tmp_path):
    source = make_image_cache(tmp_path / "files", {(256, 256): 3})
    with pytest.raises(ConfigError, match="unknown output_format 'zip'; choose one of meta"):
        convert_cache(source, tmp_path / "x", "zip")
    with pytest.raises(ConfigError, match="is the cache itself"):
        convert_cache(source, source)
    with pytest.raises(CacheNotFoundError, match="there is no folder"):
        convert_cache(tmp_path / "nothing", tmp_path / "x")
    convert_cache(source, tmp_path / "packed")
    with pytest.raises(RunError, match="already holds a finished cache"):
        convert_cache(source, tmp_path / "packed")
    next(source.glob("*x*/*")).write_bytes(b"broken")
    with pytest.raises(CacheFileError, match="damaged"):
        convert_cache(source, tmp_path / "x")


def test_convert_command(tmp_path, capsys):
    source = make_video_cache(tmp_path / "files", {(832, 480, 9): 2})
    assert main(["convert", str(source), "--output-dir", str(tmp_path / "packed"), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert (
        main(
            [
                "convert",
                str(tmp_path / "packed"),
                "--output_dir",
                str(tmp_path / "b"),
                "--output_format",
                "pt",
            ]
        )
        == 0
    )
    assert "2 samples in" in capsys.readouterr().out
    assert main(["convert", str(source), "--output_dir", str(source)]) == 1
    assert (
        capsys.readouterr().err == f"latentry: {source} is the cache itself; convert it into another folder\n"
    )
    with pytest.raises(SystemExit):
        main(["convert", str(source)])
    assert "--output_dir" in capsys.readouterr().err


@pytest.mark.parametrize("shard_size", [-5, 0, None, "ten"])
def test_metadata_without_a_usable_shard_size(tmp_path, shard_size):
    source = make_image_cache(tmp_path / "files", {(256, 256): 3})
    edit_json(source / "metadata.json", lambda metadata: metadata.update(shard_size=shard_size))
    convert_cache(source, tmp_path / "pt", "pt")
    assert len(list(TextToImageDataset(tmp_path / "pt"))) == 3


def test_failures_are_kept(photos, tmp_path, capsys):
    (photos / "broken.jpg").write_bytes((photos / "space" / "astronaut.jpg").read_bytes()[:20_000])
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    status, out, _ = run_main(
        capsys, "convert", tmp_path / "cache", "--output_dir", tmp_path / "packed", "--json"
    )
    assert status == 0
    result = json.loads(out)
    assert (result["samples"], result["output_format"]) == (12, "packed")
    assert result["output_dir"] == str(tmp_path / "packed")
    assert result["size_bytes"] > 0
    failures = [(tmp_path / name / "failures.jsonl").read_text() for name in ("cache", "packed")]
    assert failures[0] == failures[1]
    assert "broken.jpg" in failures[0]


def test_failures_of_another_form_are_no_obstacle(image_cache, tmp_path):
    cache = shutil.copytree(image_cache, tmp_path / "cache")
    (cache / "failures.jsonl").write_text('{"name": "a.jpg", "reason": "is odd"}\nnot JSON\n{"file": "b"}\n')
    convert_cache(cache, tmp_path / "packed")
    assert (tmp_path / "packed" / "failures.jsonl").read_text() == '{"name": "a.jpg", "reason": "is odd"}\n'
