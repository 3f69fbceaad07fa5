"""Batches by field, and the checks on them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import assert_same_items

from latentry.buckets import aspect_name
from latentry.cache.index import open_index
from latentry.cache.read.checks import image_columns, video_columns
from latentry.cache.read.columns import Columns
from latentry.cache.read.fields import IMAGE_FIELDS, IMAGE_TOKEN_FIELDS, VIDEO_FIELDS
from latentry.cache.read.samples import open_samples
from latentry.errors import CacheFileError
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import make_video_cache


def test_items_and_columns_are_the_same_samples():
    items = [
        {"latent": torch.ones(2), "prompt": "a", "size": (1, 2), "cache_file": "x/a.pt"},
        {"latent": torch.zeros(3), "prompt": "b", "mask": torch.ones(1), "size": torch.tensor([3, 4])},
    ]
    columns = Columns.of_items(items)
    assert columns.num_samples == 2
    assert list(columns.tensors) == ["latent", "size", "mask"]
    assert columns.tensors["mask"][0] is None
    assert columns.values["prompt"] == ["a", "b"]
    assert columns.values["size"] == [(1, 2), None], (
        "a field may be plain in one sample and a tensor in another"
    )
    assert [columns.describe(i) for i in range(2)] == ["x/a.pt", "sample 1 of the batch"]
    again = columns.items()
    assert [type(again), type(again[0])] == [list, dict]
    assert_same_items(again[0], items[0])
    assert_same_items(again[1], items[1] | {"cache_file": None})
    with pytest.raises(dataclasses.FrozenInstanceError):
        columns.num_samples = 3


@pytest.mark.parametrize("form", [0, 1])
def test_reader_returns_the_fields_as_stored(both, form):
    index = open_index(both[form], aspect_name)
    samples = open_samples(both[form], index)
    rows = [int(row) for row in index.rows_by_bucket()[0][:3]]
    columns = samples.read(rows, IMAGE_TOKEN_FIELDS)
    assert set(columns.tensors) == {"latent", "clip_tokens", "t5_tokens"}
    assert set(columns.values) == {*IMAGE_TOKEN_FIELDS.values, "cache_file"}
    assert columns.tensors["clip_tokens"].shape == (3, 1, 5), "with its leading dimension of 1"
    for i, row in enumerate(rows):
        assert torch.equal(columns.tensors["latent"][i], samples.load(row)["latent"])
        assert columns.values["prompt"][i] == samples.load(row)["prompt"]
        assert columns.describe(i) == samples.describe(row)
        assert str(both[form] / samples.file(row)) == columns.values["cache_file"][i]


@pytest.mark.parametrize("form", [0, 1])
def test_checks_give_what_the_dataset_serves(both, form):
    index = open_index(both[form], aspect_name)
    samples = open_samples(both[form], index)
    checked = image_columns(samples.read([4], IMAGE_FIELDS), [index.bucket(4)], IMAGE_FIELDS)
    assert_same_items(checked.items()[0], TextToImageDataset(both[form])[4])
    other = next(key.bucket for key in index.bucket_keys if key.bucket != index.bucket(4))
    with pytest.raises(CacheFileError, match=r"latent has shape .* not a scaled-down"):
        image_columns(samples.read([4], IMAGE_FIELDS), [other], IMAGE_FIELDS)
    with pytest.raises(CacheFileError, match="has no video_latents; it has latent, "):
        video_columns(samples.read([4], VIDEO_FIELDS), [index.bucket(4)], VIDEO_FIELDS)


def test_checks_of_videos(tmp_path):
    cache = make_video_cache(tmp_path, {(128, 64, 9): 2})
    index = open_index(cache, aspect_name)
    raw = open_samples(cache, index).read([0, 1], VIDEO_FIELDS)
    checked = video_columns(raw, [index.bucket(0)] * 2, VIDEO_FIELDS)
    assert {name: tuple(column.shape) for name, column in checked.tensors.items()} == {
        "video_latents": (2, 4, 3, 8, 16),
        "text_embeddings": (2, 7, 8),
        "text_mask": (2, 7),
        "bucket_resolution": (2, 2),
    }
