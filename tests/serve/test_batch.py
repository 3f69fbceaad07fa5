"""Batches by column, and the items that are cut out of them."""

from __future__ import annotations

import copy
import pickle
import random
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_items, edit_json

from latentry.cache.convert import convert_cache
from latentry.errors import CacheFileError, ConfigError, MetadataError
from latentry.serve.collate import collate_fn_text_to_image, collate_fn_video
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import make_image_cache


@pytest.mark.parametrize("form", [0, 1])
def test_items_of_a_batch_are_dictionaries_and_keep_nothing_alive(both, form):
    dataset = TextToImageDataset(both[form])
    items = dataset.__getitems__([0, 1])
    assert str(dataset.cache_dir) in items[1].where
    again = pickle.loads(pickle.dumps(items))
    assert [type(again), type(again[0]), type(dataset[0])] == [list, dict, dict]
    assert again[0].keys() == items[0].keys() == dataset[0].keys()
    assert type(items[0])({"prompt": "x"}) == {"prompt": "x"}, (
        "as libraries rebuild what they move to a device"
    )
    reference = weakref.ref(items[0]["latent"])
    for item in items:
        for key in [key for key, value in item.items() if isinstance(value, torch.Tensor)]:
            del item[key]
    del item, again
    assert reference() is None
    assert str(dataset.cache_dir) in items[1].where


@pytest.mark.parametrize("form", [0, 1])
def test_a_collate_function_may_change_items(both, form):
    """Items are made of columns when they are asked for; from then on they count."""
    dataset = TextToImageDataset(both[form])
    rows = list(next(iter(dataset.bucket_groups.values()))["indices"])[2::-1]
    whole = collate_fn_text_to_image(dataset.__getitems__(rows))
    changed = dataset.__getitems__(rows)
    for item in changed:
        item["latent"] = item["latent"] * 2
        item["prompt"] += "!"
    batch = collate_fn_text_to_image(changed)
    assert torch.equal(batch["image_latents"], whole["image_latents"] * 2)
    assert batch["metadata"]["prompts"] == [f"{prompt}!" for prompt in whole["metadata"]["prompts"]]
    assert_same_items(collate_fn_text_to_image([dataset[row] for row in rows]), whole)
    del changed[1]["prompt_embeds"]
    places = [re.escape(dataset.samples.describe(row)) for row in rows]
    with pytest.raises(
        CacheFileError, match=rf"{places[1]}: prompt_embeds is absent, but \[.*{places[2]}.* must stack"
    ):
        collate_fn_text_to_image([changed[2], changed[1]])


@pytest.mark.parametrize(
    "change",
    [
        lambda items: items.sort(key=lambda item: item["prompt"]),
        lambda items: items.reverse(),
        lambda items: random.Random(1).shuffle(items),
        lambda items: items.__setitem__(0, items[2]),
        lambda items: items.append(items.pop(0)),
        lambda items: items[::2],
        lambda items: items + items[:1],
        lambda items: copy.copy(items),
        lambda items: type(items)([items[1]]),
    ],
)
def test_items_are_a_list(both, change):
    dataset = TextToImageDataset(both[1])
    rows = list(next(iter(dataset.bucket_groups.values()))["indices"])[:4]
    mine, reference = dataset.__getitems__(rows), [dataset[row] for row in rows]
    assert len(mine) == 4
    mine, reference = change(mine) or mine, change(reference) or reference
    assert [item["prompt"] for item in mine] == [item["prompt"] for item in reference]
    assert_same_items(collate_fn_text_to_image(mine), collate_fn_text_to_image(reference))


def test_batches_that_cannot_be_collated(both):
    with pytest.raises(ConfigError, match="without samples"):
        collate_fn_text_to_image(TextToImageDataset(both[0]).__getitems__([]))
    for touch in (False, True):
        items = TextToImageDataset(both[0]).__getitems__([0, 1])
        if touch:
            assert items[0]
        with pytest.raises(CacheFileError, match="has no video_latents"):
            collate_fn_video(items)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("whole", [False, True])
def test_odd_tensors_in_files(tmp_path, whole):
    """As one sample or in a batch, they come without gradients, or are refused in one line."""
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
    assert item()["prompt_embeds"].is_contiguous() or not whole
    torch.save(data | {"latent": data["latent"][0].to_sparse_csr()}, odd)
    with pytest.raises(CacheFileError, match=rf"{odd}: latent is torch.sparse_csr; only plain"):
        item()


@pytest.mark.parametrize("packed", [False, True])
def test_samples_of_a_batch_that_are_not_alike(tmp_path, packed):
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
    with pytest.raises(CacheFileError, match="pooled_prompt_embeds is absent"):
        collate_fn_text_to_image(dataset.__getitems__([0, 1, 2, 3]))
    change(paths[3], latent=torch.zeros(4, 16, 32))
    dataset = served()
    with pytest.raises(
        CacheFileError, match=rf"{re.escape(dataset.samples.describe(3))}: .* not a scaled-down 256x256"
    ):
        dataset.__getitems__([0, 1, 2, 3])


def test_a_layout_with_one_name_twice_is_refused(both):
    def double(metadata: dict[str, Any]) -> None:
        metadata["packed"]["layouts"][0] *= 2

    edit_json(both[1] / "metadata.json", double)
    with pytest.raises(MetadataError, match="two tensors of one name"):
        TextToImageDataset(both[1])
