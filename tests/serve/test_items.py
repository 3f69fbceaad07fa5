"""Samples as dictionaries, and batches made of them."""

from __future__ import annotations

import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_items, edit_json

from latentry.cache.convert import convert_cache
from latentry.errors import CacheFileError, ConfigError, MetadataError
from latentry.serve.collate import collate_fn_production, collate_fn_text_to_image, collate_fn_video
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import make_image_cache


@pytest.mark.parametrize("form", [0, 1])
def test_items_are_plain_dictionaries(both, form):
    dataset = TextToImageDataset(both[form])
    items = dataset.__getitems__([0, 1])
    assert [type(items), type(items[0]), type(dataset[0])] == [list, dict, dict]
    assert items[0].keys() == dataset[0].keys()
    assert dataset.__getitems__([]) == []
    again = pickle.loads(pickle.dumps(items))
    for mine, reference in zip(again, items, strict=True):
        assert_same_items(mine, reference)
        assert mine["cache_file"] == reference["cache_file"]


@pytest.mark.parametrize("form", [0, 1])
def test_items_keep_nothing_alive(both, form):
    items = TextToImageDataset(both[form]).__getitems__([0, 1])
    reference = weakref.ref(items[0]["latent"])
    for item in items:
        for key in [key for key, value in item.items() if isinstance(value, torch.Tensor)]:
            del item[key]
    del item
    assert reference() is None


@pytest.mark.parametrize("form", [0, 1])
def test_items_may_be_changed_before_collating(both, form):
    dataset = TextToImageDataset(both[form])
    rows = list(next(iter(dataset.bucket_groups.values()))["indices"])[2::-1]
    whole = dataset.collate(dataset.read_batch(rows))
    assert_same_items(collate_fn_text_to_image(dataset.__getitems__(rows)), whole)
    assert_same_items(collate_fn_text_to_image([dataset[row] for row in rows]), whole)
    changed = dataset.__getitems__(rows)
    for item in changed:
        item["latent"] = item["latent"] * 2
        item["prompt"] += "!"
    batch = collate_fn_text_to_image(changed)
    assert torch.equal(batch["image_latents"], whole["image_latents"] * 2)
    assert batch["metadata"]["prompts"] == [f"{prompt}!" for prompt in whole["metadata"]["prompts"]]
    del changed[1]["prompt_embeds"]
    files = [re.escape(changed[i]["cache_file"]) for i in (1, 2)]
    with pytest.raises(
        CacheFileError,
        match=rf"{files[0]}: prompt_embeds is missing, but \[.*{files[1]}.* must have the same",
    ):
        collate_fn_text_to_image([changed[2], changed[1]])


def test_production_batch_has_the_keys_of_its_samples(both):
    dataset = TextToImageDataset(both[0])
    rows = list(next(iter(dataset.bucket_groups.values()))["indices"])[:3]
    batch = collate_fn_production(dataset.__getitems__(rows))
    assert set(batch) == {
        "latent", "prompt_embeds", "pooled_prompt_embeds", "clip_hidden", "prompt", "image_path", "bucket_id",
        "aspect_ratio", "crop_resolution", "original_resolution", "crop_offset",
    }  # fmt: skip
    assert batch["latent"].shape[0] == len(batch["prompt"]) == 3


def test_batches_that_cannot_be_collated(both):
    dataset = TextToImageDataset(both[0])
    for collate in (collate_fn_text_to_image, collate_fn_video, dataset.collate_items):
        with pytest.raises(ConfigError, match="without samples"):
            collate([])
    with pytest.raises(ConfigError, match="without samples"):
        dataset.collate(dataset.read_batch([]))
    items = dataset.__getitems__([0, 1])
    with pytest.raises(CacheFileError, match="has no video_latents"):
        collate_fn_video(items)
    del items[0]["bucket_id"]
    with pytest.raises(CacheFileError, match=rf"{items[0]['cache_file']} has no bucket_id"):
        collate_fn_text_to_image(items[:1])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("whole", [False, True])
def test_unusual_tensors_in_files(tmp_path, whole):
    """Alone or in a batch, tensors are served without gradients, or refused in one line."""
    cache = make_image_cache(tmp_path / "files", {(256, 256): 3})
    dataset = TextToImageDataset(cache)
    odd = cache / dataset.samples.file(1)
    data = torch.load(odd, weights_only=True)

    def item() -> dict[str, Any]:
        return dataset.__getitems__([0, 1, 2])[1] if whole else dataset[1]

    for latent in (data["latent"].clone().requires_grad_(), torch.nn.Parameter(data["latent"])):
        torch.save(data | {"latent": latent}, odd)
        assert not item()["latent"].requires_grad
        assert pickle.loads(pickle.dumps(item()))["latent"].shape == data["latent"].shape
    torch.save(data | {"prompt_embeds": torch.ones(1, 1, 1).expand(1, 7, 9)}, odd)
    assert item()["prompt_embeds"].sum() == 63
    assert item()["prompt_embeds"].is_contiguous()
    torch.save(data | {"latent": data["latent"][0].to_sparse_csr()}, odd)
    with pytest.raises(CacheFileError, match=rf"{odd}: latent is torch.sparse_csr; only plain"):
        item()


@pytest.mark.parametrize("packed", [False, True])
def test_samples_with_different_fields(tmp_path, packed):
    cache = make_image_cache(tmp_path / "files", {(256, 256): 4})
    paths = [cache / TextToImageDataset(cache).samples.file(row) for row in range(4)]

    def change(path: Path, remove: str = "", **values: torch.Tensor) -> None:
        data = torch.load(path, weights_only=True) | values
        torch.save({key: value for key, value in data.items() if key != remove}, path)

    def served() -> TextToImageDataset:
        if not packed:
            return TextToImageDataset(cache)
        convert_cache(cache, tmp_path / f"packed{len(list(tmp_path.iterdir()))}")
        return TextToImageDataset(max(tmp_path.glob("packed*")))

    change(paths[1], remove="pooled_prompt_embeds")
    dataset = served()
    items = dataset.__getitems__([0, 1, 2, 3])
    assert ["pooled_prompt_embeds" in item for item in items] == [True, False, True, True]
    for i, item in enumerate(items):
        assert_same_items(item, dataset[i])
    with pytest.raises(CacheFileError, match="pooled_prompt_embeds is missing"):
        collate_fn_text_to_image(dataset.__getitems__([0, 1, 2, 3]))
    change(paths[3], latent=torch.zeros(4, 16, 32))
    dataset = served()
    with pytest.raises(
        CacheFileError, match=rf"{re.escape(dataset.samples.describe(3))}: .* not a scaled-down 256x256"
    ):
        dataset.__getitems__([0, 1, 2, 3])


def test_layout_with_a_name_twice_is_refused(both):
    def double(metadata: dict[str, Any]) -> None:
        metadata["packed"]["layouts"][0] *= 2

    edit_json(both[1] / "metadata.json", double)
    with pytest.raises(MetadataError, match="two tensors with the same name"):
        TextToImageDataset(both[1])
