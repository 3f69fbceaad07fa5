"""Whole runs over videos, from files to batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import edit_json, real_clips, rows_of

import latentry
from latentry import Recipe, prepare
from latentry.errors import ConfigError
from latentry.media.video_options import VideoOptions
from latentry.processors import processor_class
from latentry.serve.dataset import TextToVideoDataset
from latentry.storage import content_digest
from latentry.testing import assert_same_cache, make_counter_clip, read_counter

CPU = torch.device("cpu")


@pytest.fixture
def clips(tmp_path) -> Path:
    """Four counting clips of different shapes and lengths, with captions."""
    folder = tmp_path / "clips"
    (folder / "tall").mkdir(parents=True)
    make_counter_clip(folder / "a.mp4", 40, size=(160, 96))
    make_counter_clip(folder / "b.mkv", 25, size=(160, 96))
    make_counter_clip(folder / "C.MOV", 40, size=(128, 128))
    make_counter_clip(folder / "tall" / "d_long_walk.webm", 40, codec="libvpx", size=(96, 160))
    (folder / "a.json").write_text(json.dumps({"caption": "counting up"}))
    (folder / "meta.json").write_text(
        json.dumps({"items": [{"file_name": "tall/d_long_walk.webm", "caption": "tall"}]})
    )
    return folder


def tiny_recipe(**options) -> Recipe:
    return Recipe(max_pixels=128 * 128, video=VideoOptions(**options), output_format="meta")


def test_videos_to_batches(clips, tmp_path):
    result = prepare(
        tiny_recipe(target_frames=25, windows="uniform"),
        video_dir=clips,
        output_dir=tmp_path / "cache",
        verify=True,
    )
    assert (result.num_encoded, result.failures) == (4, ())
    assert all(value > 20 for _, value in result.psnr_db.values())
    for row in rows_of(tmp_path / "cache"):
        data = torch.load(row["cache_file"], weights_only=True)
        width, height = row["bucket_resolution"]
        assert row["num_frames"] == data["num_frames"] == 25
        assert data["video_latents"].shape == (1, 16, 25, height // 8, width // 8)
        assert data["text_embeddings"].shape == (1, 64, 64)
        assert data["first_frame"].shape == (height, width, 3)
        assert data["first_frame"].dtype == torch.uint8
        assert read_counter(data["first_frame"].numpy()) == 0
        assert data["processing_mode"] == "video"
        assert data["deterministic_latents"] is True
        assert Path(data["video_path"]).is_file()
        decoded = processor_class("tiny")("embedded", CPU, torch.float32).decode_latents(
            data["video_latents"]
        )[0]
        total = 25 if row["source_name"] == "b.mkv" else 40
        expected = np.linspace(0, total - 1, 25).astype(int).tolist()
        assert [read_counter(frame.permute(1, 2, 0).numpy()) for frame in decoded.unbind(1)] == expected

    loader, _ = latentry.build_video_multiresolution_dataloader(
        cache_dir=tmp_path / "cache", model_type="tiny", batch_size=2, drop_last=False, num_workers=0
    )
    shapes = sorted(tuple(batch["video_latents"].shape) for batch in loader)
    assert [shape[0] for shape in shapes] == [1, 1, 2]


def test_real_clips(tmp_path):
    folder = real_clips()[0].parent
    recipe = Recipe(max_pixels=192 * 192, video=VideoOptions(target_frames=9))
    result = prepare(recipe, video_dir=folder, output_dir=tmp_path / "cache", verify=True)
    assert (result.num_encoded, result.failures) == (4, ())
    assert min(value for _, value in result.psnr_db.values()) > 22


def test_without_target_frames(clips, tmp_path, wan_folder):
    recipe = Recipe(processor="wan", model_name=str(wan_folder), max_pixels=64 * 64, video=VideoOptions())
    prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache")
    assert {row["source_name"]: row["num_frames"] for row in rows_of(tmp_path / "cache")} == {
        "C.MOV": 37, "a.mp4": 37, "b.mkv": 25, "tall/d_long_walk.webm": 37,
    }  # fmt: skip
    dataset = TextToVideoDataset(tmp_path / "cache")
    assert all(len(key) == 3 for key in dataset.sorted_bucket_keys), (
        "lengths differ, so they are part of the key"
    )
    for row in rows_of(tmp_path / "cache"):
        data = torch.load(row["cache_file"], weights_only=True)
        assert data["video_latents"].shape[2] == (row["num_frames"] - 1) // 4 + 1
        assert data["model_version"] == "wan2.1"


def test_frames_mode(clips, tmp_path):
    cache = tmp_path / "cache"
    result = prepare(tiny_recipe(mode="frames", num_frames=8), video_dir=clips, output_dir=cache)
    assert result.num_encoded == 32
    rows = [row for row in rows_of(cache) if row["source_name"] == "a.mp4"]
    assert [row["frame_index"] for row in rows] == list(range(1, 9))
    assert {row["total_frames_extracted"] for row in rows} == {8}
    assert [row["source_frame_index"] for row in rows] == np.linspace(0, 39, 8).astype(int).tolist()
    tiny = processor_class("tiny")("embedded", CPU, torch.float32)
    for row in rows:
        data = torch.load(row["cache_file"], weights_only=True)
        assert data["video_latents"].shape[2] == 1
        assert data["first_frame"] is None
        assert data["frame_index"] == row["frame_index"]
        assert data["processing_mode"] == "frames"
        assert data["prompt"] == "counting up"
        image = tiny.decode_latents(data["video_latents"])[0, :, 0].permute(1, 2, 0).numpy()
        assert read_counter(image) == row["source_frame_index"] == data["source_frame_index"]
    again = prepare(tiny_recipe(mode="frames", num_frames=8), video_dir=clips, output_dir=cache)
    assert (again.num_encoded, again.num_already_done) == (0, 32)
    (clips / "a.json").write_text(json.dumps({"caption": "counting down"}))
    changed = prepare(tiny_recipe(mode="frames", num_frames=8), video_dir=clips, output_dir=cache)
    assert (changed.num_encoded, changed.num_already_done) == (8, 24)


def count_frames_from_0(cache: Path) -> None:
    """Make a frames cache what version 0.1 wrote: ``frame_index`` counts from 0, in rows and files."""

    def change(rows):
        for row in rows:
            row["frame_index"] -= 1
            data = torch.load(row["cache_file"], weights_only=True)
            torch.save({**data, "frame_index": data["frame_index"] - 1}, row["cache_file"])
            path = Path(row["cache_file"])
            row |= {"file_bytes": path.stat().st_size, "file_digest": content_digest(path)}

    edit_json(cache / "metadata_shard_0000.json", change)


def test_older_frames_caches_count_from_0(clips, tmp_path):
    cache, recipe = tmp_path / "cache", tiny_recipe(mode="frames", num_frames=8)
    later = (clips / "C.MOV").rename(tmp_path / "C.MOV")
    prepare(recipe, video_dir=clips, output_dir=cache)
    count_frames_from_0(cache)
    checked = latentry.verify_cache(cache, decode=True)
    assert checked.problems == ()
    assert min(checked.psnr_db.values()) > 20, "each latent is compared with its own frame"
    later.rename(clips / "C.MOV")
    added = prepare(recipe, video_dir=clips, output_dir=cache)
    assert (added.num_encoded, added.num_already_done) == (8, 24)
    indices = defaultdict(list)
    for row in rows_of(cache):
        indices[row["source_name"]].append(row["frame_index"])
    assert list(indices.values()) == [list(range(1, 9))] * 4
    assert latentry.verify_cache(cache, decode=True).problems == ()


def test_damaged_clip_counts_as_one_failure_in_a_row(clips, tmp_path):
    whole = make_counter_clip(clips / "broken.mkv", 60, size=(160, 96)).read_bytes()
    broken = bytearray(whole)
    broken[len(whole) // 3 : len(whole) // 3 * 2] = bytes(len(whole) // 3)
    (clips / "broken.mkv").write_bytes(broken)
    recipe = tiny_recipe(mode="frames", num_frames=8)
    result = prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache", max_failures=3)
    assert result.num_encoded >= 32


def test_jsonl_captions_of_videos(clips, tmp_path):
    (clips / "list.jsonl").write_text(json.dumps({"file_name": "b.mkv", "caption": "from the list"}))
    prepare(tiny_recipe(target_frames=5), video_dir=clips, output_dir=tmp_path / "cache")
    prompts = {row["source_name"]: row["prompt"] for row in rows_of(tmp_path / "cache")}
    assert prompts["b.mkv"] == "from the list"


def test_out_of_memory_halves_the_batch(clips, tmp_path, monkeypatch):
    from latentry.processors.tiny import TinyProcessor

    plain = tiny_recipe(mode="frames", num_frames=4)
    prepare(plain, video_dir=clips, output_dir=tmp_path / "plain", batch_size=1)
    encode, texts = TinyProcessor.encode_pixels, TinyProcessor.encode_texts

    def small_device(self, pixels, seeds):
        if len(pixels) > 1:
            raise torch.OutOfMemoryError
        return encode(self, pixels, seeds)

    def small_texts(self, captions):
        if len(captions) > 1:
            raise torch.OutOfMemoryError
        return texts(self, captions)

    monkeypatch.setattr(TinyProcessor, "encode_pixels", small_device)
    monkeypatch.setattr(TinyProcessor, "encode_texts", small_texts)
    prepare(plain, video_dir=clips, output_dir=tmp_path / "halved", batch_size=4)
    assert_same_cache(tmp_path / "halved", tmp_path / "plain")


def test_short_clips(clips, tmp_path):
    skipped = prepare(tiny_recipe(target_frames=33), video_dir=clips, output_dir=tmp_path / "skip")
    assert skipped.exit_status == 2
    assert [(f.name, f.reason) for f in skipped.failures] == [
        ("b.mkv", "has 25 frames, fewer than the 33 requested")
    ]
    padded = prepare(
        tiny_recipe(target_frames=33, short_clips="pad"), video_dir=clips, output_dir=tmp_path / "pad"
    )
    assert (padded.num_encoded, padded.failures) == (4, ())


def test_invalid_options(clips, tmp_path, wan_folder):
    def wan(**options):
        return Recipe(processor="wan", model_name=str(wan_folder), **options)

    for recipe, says in (
        (wan(video=VideoOptions(), size=(100, 64)), "multiples of 16; the nearest is 96x64"),
        (wan(video=VideoOptions(target_frames=10)), r"takes 4n\+1; the nearest are 9 and 13"),
        (Recipe(processor="flux", video=VideoOptions()), "encodes images, not videos"),
        (wan(), "encodes videos, not images"),
    ):
        with pytest.raises(ConfigError, match=says):
            prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache")
    for options, says in (
        ({"mode": "film"}, "mode 'film'"),
        ({"resize_mode": "cubic"}, "resize_mode 'cubic'"),
        ({"num_frames": 0}, "num_frames is 0"),
        ({"target_fps": float("inf")}, "target_fps is inf"),
        ({"mode": "frames", "target_fps": 3.0}, "for video mode"),
    ):
        with pytest.raises(ConfigError, match=says):
            VideoOptions(**options)


@pytest.mark.parametrize("resize_mode", ["bilinear", "bicubic", "nearest", "area", "lanczos"])
def test_fixed_size_and_resize_modes(clips, tmp_path, resize_mode):
    recipe = Recipe(
        video=VideoOptions(target_frames=5, resize_mode=resize_mode), size=(128, 64), crop_mode="none"
    )
    prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache")
    for row in rows_of(tmp_path / "cache"):
        assert row["bucket_resolution"] == [128, 64]
        assert row["bucket_id"] is None
        frame = torch.load(row["cache_file"], weights_only=True)["first_frame"].numpy()
        assert read_counter(frame) == 0


@pytest.mark.slow
def test_two_workers_make_the_same_cache_as_one(clips, tmp_path):
    (clips / "broken.mp4").write_bytes(b"nothing")
    command = [sys.executable, "-m", "latentry", "video", "--video_dir", str(clips), "--target_frames", "9"]
    for devices in ("cpu", "cpu,cpu"):
        done = subprocess.run(
            [
                *command,
                "--max_pixels",
                "16384",
                "--devices",
                devices,
                "--output_dir",
                str(tmp_path / devices),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 2, done.stderr
    assert_same_cache(tmp_path / "cpu", tmp_path / "cpu,cpu")
