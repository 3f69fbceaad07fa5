"""What Latentry writes has the keys that NeMo AutoModel's tool writes, in the same order. Ours come after them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import DATA, SMALL, rows_of

from latentry import Recipe, VideoOptions, convert_cache, prepare
from latentry.cache.format import row_from_dict
from latentry.testing import make_counter_clip

NEMO = DATA / "nemo_caches"
IMAGE_METADATA = [
    "processor", "model_name", "model_type", "total_items", "num_shards", "shard_size", "shards", "caption_field",
    "max_pixels",
]  # fmt: skip
VIDEO_METADATA = [
    "processor", "model_name", "model_type", "total_items", "num_shards", "shard_size", "shards", "caption_format",
    "caption_field", "max_pixels", "mode", "target_frames",
]  # fmt: skip
OURS_IN_METADATA = ["recipe", "fingerprint", "format_version"]


@pytest.fixture
def clip_folder(tmp_path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    make_counter_clip(folder / "a.mp4", 9, size=(160, 96))
    return folder


def metadata_of(cache: Path) -> dict:
    return json.loads((cache / "metadata.json").read_text())


def first_row(cache: Path) -> dict:
    return rows_of(cache)[0]


def first_file(cache: Path) -> dict:
    return torch.load(next(cache.glob("*x*/*")), weights_only=True)


def wan_recipe(wan_folder: Path, **options) -> Recipe:
    return Recipe(
        processor="wan",
        model_name=str(wan_folder),
        max_pixels=64 * 64,
        output_format="meta",
        video=VideoOptions(**options),
    )


def test_images(photos, tmp_path, flux_folder):
    recipe = Recipe(processor="flux", model_name=str(flux_folder), max_pixels=64 * 64)
    prepare(recipe, image_dir=photos, output_dir=tmp_path / "cache", max_files=1)
    written, theirs = metadata_of(tmp_path / "cache"), metadata_of(NEMO / "image_flux")
    assert list(theirs) == IMAGE_METADATA
    assert list(written) == IMAGE_METADATA + OURS_IN_METADATA
    assert written["caption_field"] == theirs["caption_field"] == "internvl"
    row, their_row = first_row(tmp_path / "cache"), first_row(NEMO / "image_flux")
    assert list(row)[: len(their_row)] == list(their_row)
    data, their_data = first_file(tmp_path / "cache"), first_file(NEMO / "image_flux")
    assert list(data) == list(their_data)
    for key, value in their_data.items():
        assert type(data[key]) is type(value), key
        if isinstance(value, torch.Tensor):
            assert (data[key].dtype, data[key].ndim) == (value.dtype, value.ndim), key


def test_clips(clip_folder, tmp_path, wan_folder):
    recipe = wan_recipe(wan_folder, target_frames=5)
    prepare(recipe, video_dir=clip_folder, output_dir=tmp_path / "cache")
    written = metadata_of(tmp_path / "cache")
    assert list(written) == VIDEO_METADATA + OURS_IN_METADATA
    assert set(metadata_of(NEMO / "video_wan")) <= set(VIDEO_METADATA)
    assert [written[key] for key in VIDEO_METADATA[-5:]] == ["auto", "caption", 64 * 64, "video", 5]
    row, their_row = first_row(tmp_path / "cache"), first_row(NEMO / "video_wan")
    assert list(row)[: len(their_row)] == list(their_row)
    assert list(row).index("num_frames") < list(row).index("prompt")
    data, their_data = first_file(tmp_path / "cache"), first_file(NEMO / "video_wan")
    assert list(data) == [*their_data, "crop_offset"]
    for key, value in their_data.items():
        assert type(data[key]) is type(value), key
    assert data["first_frame"].dtype == torch.uint8


def test_frames(clip_folder, tmp_path, wan_folder):
    recipe = wan_recipe(wan_folder, mode="frames", num_frames=3)
    prepare(recipe, video_dir=clip_folder, output_dir=tmp_path / "cache")
    written = metadata_of(tmp_path / "cache")
    assert (written["mode"], written["target_frames"]) == ("frames", None)
    their_row = [
        *first_row(NEMO / "video_wan"),
        "frame_index",
        "total_frames_extracted",
        "source_frame_index",
    ]
    rows = rows_of(tmp_path / "cache")
    assert list(rows[0])[: len(their_row)] == their_row
    assert [row["frame_index"] for row in rows] == [1, 2, 3]
    data = first_file(tmp_path / "cache")
    assert list(data)[: len(first_file(NEMO / "video_wan"))] == list(first_file(NEMO / "video_wan"))
    assert data["first_frame"] is None
    assert (data["model_version"], data["processing_mode"]) == ("wan2.1", "frames")


@pytest.mark.parametrize("output_format", ["safetensors", "packed"])
def test_frames_survive_conversion(clip_folder, tmp_path, output_format):
    recipe = Recipe(max_pixels=64 * 64, video=VideoOptions(mode="frames", num_frames=3))
    prepare(recipe, video_dir=clip_folder, output_dir=tmp_path / "cache")
    convert_cache(tmp_path / "cache", tmp_path / "other", output_format)
    convert_cache(tmp_path / "other", tmp_path / "again", "pt")
    for row, again in zip(rows_of(tmp_path / "cache"), rows_of(tmp_path / "again"), strict=True):
        first, second = (torch.load(r["cache_file"], weights_only=True) for r in (row, again))
        assert first.keys() == second.keys()
        assert second["first_frame"] is None
        assert first["frame_index"] == second["frame_index"] == again["frame_index"]


def test_an_explicit_size_has_no_bucket_id(clip_folder, tmp_path):
    recipe = Recipe(size=(64, 64), video=VideoOptions(target_frames=3))
    prepare(recipe, video_dir=clip_folder, output_dir=tmp_path / "cache")
    row = first_row(tmp_path / "cache")
    assert row["bucket_id"] is None
    assert first_file(tmp_path / "cache")["bucket_id"] is None


def test_masks_are_int64(clip_folder, tmp_path, hunyuan_folder):
    (clip_folder / "a.json").write_text(json.dumps({"caption": 'a sign that says "open"'}))
    recipe = Recipe(
        processor="hunyuanvideo",
        model_name=str(hunyuan_folder),
        max_pixels=64 * 64,
        video=VideoOptions(target_frames=5),
    )
    prepare(recipe, video_dir=clip_folder, output_dir=tmp_path / "cache")
    data = first_file(tmp_path / "cache")
    assert {data[key].dtype for key in ("text_mask", "text_mask_2")} == {torch.int64}
    assert data["text_mask_2"].sum() > 0
    assert list(data)[:7] == [
        "video_latents", "text_embeddings", "text_mask", "text_embeddings_2", "text_mask_2", "image_embeds",
        "first_frame",
    ]  # fmt: skip


def test_metadata_of_images_has_no_keys_of_videos(photos, tmp_path):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", max_files=1)
    assert not {"mode", "target_frames", "caption_format"} & metadata_of(tmp_path / "cache").keys()


@pytest.mark.parametrize(
    ("row", "number"),
    [
        (
            {"source_name": "a.mp4", "sample_name": "a.mp4#3", "frame_index": 3},
            3,
        ),  # written before version 0.2
        ({"source_name": "a.mp4", "sample_name": "a.mp4#3", "frame_index": 4}, 3),
        ({"source_name": "a#1.mp4", "sample_name": "a#1.mp4", "frame_index": 0}, 0),
        ({"source_name": "a#1.mp4", "sample_name": "a#1.mp4", "frame_index": 1}, 0),
        ({"frame_index": 5}, 4),  # of another tool
        ({}, 0),
    ],
)
def test_the_number_of_a_sample(row, number):
    assert row_from_dict({"cache_file": "a.pt", **row}).number == number
