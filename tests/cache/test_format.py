"""Rows and metadata.json: typed records that keep what other tools wrote."""

from __future__ import annotations

import json

import msgspec
import pytest
from helpers import DATA, SMALL, edit_json, rows_of

from latentry import prepare
from latentry.cache.convert import convert_cache
from latentry.cache.format import (
    CacheMetadata,
    Row,
    read_metadata,
    row_from_dict,
)
from latentry.cache.locator import FileLocator
from latentry.errors import MetadataError
from latentry.serve.dataset import TextToImageDataset


def foreign_rows() -> list[dict]:
    return [
        row
        for shard in sorted((DATA / "nemo_caches").glob("*/metadata_shard_*.json"))
        for row in json.loads(shard.read_text())
    ]


def test_rows_of_other_tools_survive_unchanged():
    rows = foreign_rows()
    assert len(rows) > 5
    for row in rows:
        row = {**row, "rating": 4.5, "tags": ["a", {"b": None}]}
        typed = row_from_dict(row)
        assert typed.other == {"rating": 4.5, "tags": ["a", {"b": None}]}
        assert typed.to_dict() == row


def test_own_rows_survive_in_the_same_order_of_keys(photos, tmp_path):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", max_files=2)
    for row in rows_of(tmp_path / "cache"):
        assert list(row_from_dict(row).to_dict().items()) == list(row.items())
    text = (tmp_path / "cache" / "metadata.json").read_text()
    assert read_metadata(tmp_path / "cache").to_json() == text


def test_documented_keys_come_first_in_the_documented_order(photos, tmp_path):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", max_files=1)
    (row,) = rows_of(tmp_path / "cache")
    assert list(row)[:9] == [
        "cache_file", "image_path", "bucket_resolution", "original_resolution", "prompt", "bucket_id", "aspect_ratio",
        "pixels", "model_type",
    ]  # fmt: skip


def test_missing_and_null_are_different():
    assert row_from_dict({"cache_file": "a.pt", "bucket_id": None}).to_dict() == {
        "cache_file": "a.pt",
        "bucket_id": None,
    }
    assert row_from_dict({"cache_file": "a.pt"}).to_dict() == {"cache_file": "a.pt"}
    assert "caption_field" not in json.loads(CacheMetadata(shards=["x"]).to_json())
    assert json.loads(CacheMetadata(shards=["x"], caption_field=None).to_json())["caption_field"] is None


def test_mistyped_fields_are_errors():
    with pytest.raises(msgspec.ValidationError, match=r"num_frames"):
        row_from_dict({"cache_file": "a.pt", "num_frames": "many"})
    with pytest.raises(MetadataError, match="no bucket_resolution"):
        _ = Row(cache_file="a.pt").bucket


def test_a_row_finds_its_file(tmp_path):
    row = row_from_dict({"cache_file": "/x/part_a/0a.pt", "crop_resolution": [512, 256]})
    assert row.files(FileLocator(tmp_path)) == ("512x256/0a.pt",)
    (tmp_path / "part_a").mkdir()
    (tmp_path / "part_a" / "0a.pt").touch()
    assert row.files(FileLocator(tmp_path)) == ("part_a/0a.pt",)


def test_unknown_keys_of_metadata_and_rows_survive_conversion(nemo_image_cache, tmp_path):
    path = nemo_image_cache / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "studio": {"name": "x"}}))
    shard = nemo_image_cache / "metadata_shard_0000.json"
    shard.write_text(json.dumps([{**row, "rating": 3} for row in json.loads(shard.read_text())]))
    convert_cache(nemo_image_cache, tmp_path / "packed")
    convert_cache(tmp_path / "packed", tmp_path / "files", "pt")
    assert read_metadata(tmp_path / "files").other["studio"] == {"name": "x"}
    assert sum(row.get("rating") == 3 for row in rows_of(tmp_path / "files")) == len(
        json.loads(shard.read_text())
    )


def test_mistyped_fields_that_nothing_depends_on_are_kept():
    row = {
        "cache_file": "a.pt",
        "bucket_resolution": [64, 64],
        "aspect_ratio": 1,
        "prompt": None,
        "pixels": 4096.5,
    }
    row |= {"source_bytes": "many", "model_type": "flux"}
    typed = row_from_dict(row)
    assert (typed.prompt, typed.pixels, typed.source_bytes, typed.model_type) == (None, None, None, "flux")
    assert typed.to_dict() == row
    assert type(typed.to_dict()["aspect_ratio"]) is int


def test_a_cache_is_served_and_converted_whatever_its_recipe_says(nemo_image_cache, tmp_path):
    def change(metadata):
        metadata.update(max_pixels=65536.5, model_name={"a": 1}, recipe="flux", fingerprint=None)

    edit_json(nemo_image_cache / "metadata.json", change)
    assert len(list(TextToImageDataset(nemo_image_cache))) == 6
    convert_cache(nemo_image_cache, tmp_path / "packed")
    written = json.loads((tmp_path / "packed" / "metadata.json").read_text())
    assert (written["max_pixels"], written["model_name"], written["recipe"]) == (65536.5, {"a": 1}, "flux")
    assert written["fingerprint"] is None
