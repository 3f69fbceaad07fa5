from __future__ import annotations

import json
import pickle

import pytest
import torch

from latentry.cache.convert import convert_cache
from latentry.cache.read.columns import Columns
from latentry.errors import CacheFileError, ConfigError, MetadataError
from latentry.serve.dataset import BaseMultiresolutionDataset, TextToImageDataset, TextToVideoDataset
from latentry.testing import make_image_cache, make_video_cache


def test_moved_image_cache_of_another_tool_opens(nemo_image_cache):
    dataset = TextToImageDataset(str(nemo_image_cache))
    assert len(dataset) == 6
    assert dataset.sorted_bucket_keys == [
        ("wide", (256, 192)),
        ("tall", (192, 256)),
        ("wide", (320, 192)),
        ("tall", (192, 320)),
        ("square", (256, 256)),
    ]
    assert dataset.bucket_groups["square", (256, 256)]["indices"].tolist() == [2, 3]
    assert dataset.get_bucket_info()["buckets"]["square/256x256"] == 2
    item = dataset[1]
    file = nemo_image_cache / "192x256" / "97f6996d27025e53675f85d64d7cd88e.pt"
    stored = torch.load(file, weights_only=True)
    assert torch.equal(item["latent"], stored["latent"])
    assert torch.equal(item["prompt_embeds"], stored["prompt_embeds"][0])
    assert item["pooled_prompt_embeds"].shape == (12,)
    assert item["clip_hidden"].shape == (77, 12)
    assert item["crop_resolution"].tolist() == [192, 256]
    assert item["original_resolution"].tolist() == [480, 640]
    assert item["prompt"] == "a test pattern number 1"
    assert item["image_path"] == "/data/photos/photo_01.jpg"
    assert (item["bucket_id"], item["aspect_ratio"]) == (1, 0.75)
    assert item["cache_file"] == str(file)


def test_tokens_instead_of_embeddings(nemo_image_cache):
    item = TextToImageDataset(nemo_image_cache, train_text_encoder=True)[0]
    assert item["clip_tokens"].shape == (77,)
    assert item["t5_tokens"].shape == (512,)
    assert "prompt_embeds" not in item


def test_moved_video_cache_of_another_tool_opens(nemo_video_cache):
    dataset = TextToVideoDataset(nemo_video_cache)
    assert dataset.sorted_bucket_keys == [("wide", (160, 96)), ("tall", (96, 160)), ("square", (128, 128))]
    item = dataset[0]
    assert item["video_latents"].shape == (1, 16, 3, 12, 20)
    assert item["text_embeddings"].shape == (1, 226, 8)
    assert item["bucket_resolution"].tolist() == [160, 96]


def test_metadata_rows(nemo_image_cache):
    rows = TextToImageDataset(nemo_image_cache).metadata
    assert len(rows) == 6
    assert [row["prompt"] for row in rows][2:5] == [row["prompt"] for row in rows[2:5]]
    assert rows[-1]["image_path"] == "/data/photos/photo_05.jpg"
    assert rows[4]["cache_file"] == str(nemo_image_cache / "320x192" / "1f120170be85ec04e15b1874234f7a81.pt")
    with pytest.raises(IndexError):
        rows[6]


def test_clips_of_different_lengths_are_different_buckets(tmp_path):
    cache = make_video_cache(tmp_path, {(128, 64, 9): 3, (128, 64, 17): 2, (64, 64, 9): 1})
    dataset = TextToVideoDataset(cache)
    assert dataset.sorted_bucket_keys == [
        ("square", (64, 64), 9),
        ("wide", (128, 64), 9),
        ("wide", (128, 64), 17),
    ]
    assert dataset.get_bucket_info()["buckets"]["wide/128x64/17"] == 2
    for key, group in dataset.bucket_groups.items():
        assert {dataset[i]["video_latents"].shape[2] for i in group["indices"]} == {(key[2] - 1) // 4 + 1}


def test_fingerprint_depends_on_samples_not_on_the_folder(nemo_image_cache, tmp_path):
    here = TextToImageDataset(nemo_image_cache).fingerprint
    there = nemo_image_cache.rename(tmp_path / "there")
    assert TextToImageDataset(there).fingerprint == here
    shard = there / "metadata_shard_0001.json"
    shard.write_text(shard.read_text().replace("1f120170", "1f120171"))
    assert TextToImageDataset(there).fingerprint != here


def test_pickled_dataset_is_small(image_cache):
    dataset = TextToImageDataset(image_cache)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000
    copy = pickle.loads(pickled)
    assert copy.fingerprint == dataset.fingerprint
    assert copy[5]["prompt"] == dataset[5]["prompt"]


def test_other_model_type_is_logged(nemo_video_cache, caplog):
    TextToVideoDataset(nemo_video_cache, model_type="hunyuan")
    assert "was made for 'wan', but model_type is 'hunyuan'" in caplog.text


def test_custom_dataset(nemo_image_cache):
    class Prompts(BaseMultiresolutionDataset):
        def __getitem__(self, idx):
            return {"prompt": self.metadata[idx]["prompt"]}

    dataset = Prompts(str(nemo_image_cache), quantization=64)
    assert [dataset[i]["prompt"] for i in range(2)] == ["a test pattern number 0", "a test pattern number 1"]
    assert dataset.calculator.quantization == 64
    assert dataset.__getitems__([1, 0]) == [dataset[1], dataset[0]]
    assert dataset.read_batch([1, 0]).values == {
        "prompt": ["a test pattern number 1", "a test pattern number 0"]
    }
    with pytest.raises(ConfigError, match="Prompts has no collate; give the loader a collate_fn"):
        dataset.collate_items([dataset[0]])
    with pytest.raises(ConfigError, match="defines neither read_batch nor __getitem__"):
        BaseMultiresolutionDataset(nemo_image_cache)[0]


def test_custom_dataset_that_reads_batches(nemo_image_cache):
    class Prompts(BaseMultiresolutionDataset):
        def read_batch(self, indices, resources=None):
            return Columns.of_items([{"prompt": self.metadata[idx]["prompt"]} for idx in indices])

    dataset = Prompts(nemo_image_cache)
    assert dataset[1] == {"prompt": "a test pattern number 1"}
    assert dataset.__getitems__([0, 1]) == [dataset[0], dataset[1]]
    assert not dataset.has_own_items


def test_subclass_keeps_some_rows(nemo_image_cache):
    class Squares(TextToImageDataset):
        def __init__(self, cache_dir):
            super().__init__(cache_dir)
            self.metadata = [row for row in self.metadata if row["bucket_id"] == 2]
            self._group_by_bucket()

    dataset = Squares(nemo_image_cache)
    assert len(dataset) == len(dataset.metadata) == 2
    assert dataset.sorted_bucket_keys == [("square", (256, 256))]
    assert [dataset[i]["prompt"] for i in range(2)] == ["photo 02", "a test pattern number 3"]
    assert dataset.fingerprint != TextToImageDataset(nemo_image_cache).fingerprint


def test_optional_video_fields_are_checked(tmp_path):
    cache = make_video_cache(tmp_path, {(128, 64, 9): 1})
    (file,) = cache.glob("128x64/*.meta")
    data = torch.load(file, weights_only=True)
    torch.save({**data, "text_mask": torch.ones(7), "image_embeds": torch.ones(5, 3)}, file)
    item = TextToVideoDataset(cache)[0]
    assert item["text_mask"].shape == (1, 7)
    assert item["image_embeds"].shape == (1, 5, 3)
    for change, says in (
        ({"text_mask": [1, 2]}, "text_mask is a list"),
        ({"video_latents": torch.zeros(1, 4, 50, 8, 16)}, "50 frames.*num_frames 9"),
    ):
        torch.save({**data, **change}, file)
        with pytest.raises(CacheFileError, match=says):
            TextToVideoDataset(cache)[0]


def test_wrong_index_is_an_index_error(image_cache):
    dataset = TextToImageDataset(image_cache)
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    assert dataset[-1]["prompt"] == dataset[len(dataset) - 1]["prompt"]


def test_fingerprints_do_not_change_between_releases(tmp_path):
    """Saved states contain them: a state from release 0.1 must still load."""
    images = make_image_cache(tmp_path / "images", {(256, 256): 3, (320, 192): 2})
    clips = make_video_cache(tmp_path / "clips", {(128, 64, 9): 2, (128, 64, 17): 1})
    assert TextToImageDataset(images).fingerprint == "ff2a0736f530f42d33b6b7994f6fbdde"
    assert TextToVideoDataset(clips).fingerprint == "90d2bb1ce4949b48232ad888c574d68e"


def test_a_mixin_that_overrides_items_is_honoured_in_batches(nemo_image_cache):
    class Loud:
        def __getitem__(self, idx):
            item = super().__getitem__(idx)
            return {**item, "prompt": item["prompt"].upper()}

    class LoudDataset(Loud, TextToImageDataset):
        pass

    dataset = LoudDataset(nemo_image_cache)
    assert dataset.has_own_items
    assert [item["prompt"] for item in dataset.__getitems__([0, 1])] == [dataset[i]["prompt"] for i in (0, 1)]
    assert dataset[0]["prompt"].isupper()


# ---- subclasses that load their own rows ----------------------------------------------------


class ReturnsRows(TextToImageDataset):
    def _load_metadata(self):
        return [row for row in super()._load_metadata() if row["bucket_id"] == 2]


class AssignsRows(TextToImageDataset):
    def _load_metadata(self):
        super()._load_metadata()
        self.metadata = [row for row in self.metadata if row["bucket_id"] == 2]


class ReadsRows(TextToImageDataset):
    """Does not need ``metadata.json``."""

    def _load_metadata(self):
        rows = [
            row
            for shard in sorted(self.cache_dir.glob("metadata_shard_*.json"))
            for row in json.loads(shard.read_text())
        ]
        return [{**row, "prompt": row["prompt"].upper()} for row in rows if row["bucket_id"] == 2]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [ReturnsRows, AssignsRows])
def test_a_subclass_chooses_rows_while_loading(nemo_image_cache, tmp_path, kind, packed):
    if packed:
        convert_cache(nemo_image_cache, tmp_path / "packed")
        nemo_image_cache = tmp_path / "packed"
    dataset = kind(nemo_image_cache)
    assert len(dataset) == len(dataset.metadata) == 2
    assert dataset.sorted_bucket_keys == [("square", (256, 256))]
    assert [item["prompt"] for item in dataset] == ["photo 02", "a test pattern number 3"]
    copy = pickle.loads(pickle.dumps(dataset))
    assert [copy[i]["prompt"] for i in range(2)] == ["photo 02", "a test pattern number 3"]


@pytest.mark.parametrize("with_metadata", [True, False])
def test_a_subclass_reads_its_own_rows(nemo_image_cache, with_metadata):
    if not with_metadata:
        (nemo_image_cache / "metadata.json").unlink()
    dataset = ReadsRows(nemo_image_cache)
    assert [item["prompt"] for item in dataset] == ["PHOTO 02", "A TEST PATTERN NUMBER 3"]
    assert dataset.bucket_groups["square", (256, 256)]["indices"] == [0, 1]
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[0]["prompt"] == "PHOTO 02"


def test_a_subclass_whose_rows_are_wrong(nemo_image_cache):
    class Wrong(TextToImageDataset):
        def _load_metadata(self):
            return [{"cache_file": "a.pt", "bucket_resolution": "large"}]

    with pytest.raises(MetadataError, match="the rows given for"):
        Wrong(nemo_image_cache)


def test_a_subclass_that_loads_nothing(nemo_image_cache):
    class Nothing(TextToImageDataset):
        def _load_metadata(self):
            return None

    with pytest.raises(ConfigError, match=r"Nothing\._load_metadata returned no rows and assigned none"):
        Nothing(nemo_image_cache)
