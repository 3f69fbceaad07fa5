"""The loader: its batches, its state, its attributes."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch
from helpers import assert_same_items
from torch.utils.data import DataLoader

import latentry
from latentry.errors import CacheFileError, ConfigError, StateError
from latentry.serve.collate import collate_fn_text_to_image, collate_fn_video
from latentry.serve.dataset import TextToImageDataset
from latentry.serve.sampler import SequentialBucketSampler
from latentry.testing import assert_resumes, make_image_cache, make_video_cache

build_images = latentry.build_text_to_image_multiresolution_dataloader
build_videos = latentry.build_video_multiresolution_dataloader

# ---- batches --------------------------------------------------------------------------------


def test_image_batch_is_as_documented(nemo_image_cache):
    loader, sampler = build_images(cache_dir=nemo_image_cache, batch_size=2, drop_last=False, num_workers=0)
    assert isinstance(loader, DataLoader)
    assert isinstance(sampler, SequentialBucketSampler)
    batches = list(loader)
    assert len(batches) == len(loader) == len(sampler) == 5
    batch = next(b for b in batches if len(b["image_latents"]) == 2)
    assert set(batch) == {
        "image_latents", "text_embeddings", "pooled_prompt_embeds", "clip_hidden", "data_type", "metadata"
    }  # fmt: skip
    assert batch["data_type"] == "image"
    assert batch["image_latents"].shape == (2, 16, 32, 32)
    assert batch["text_embeddings"].shape == (2, 512, 8)
    assert batch["pooled_prompt_embeds"].shape == (2, 12)
    assert batch["clip_hidden"].shape == (2, 77, 12)
    metadata = batch["metadata"]
    assert set(metadata) == {
        "prompts", "image_paths", "bucket_ids", "aspect_ratios",
        "crop_resolution", "original_resolution", "crop_offset",
    }  # fmt: skip
    assert sorted(metadata["prompts"]) == ["a test pattern number 3", "photo 02"]
    assert metadata["bucket_ids"] == [2, 2]
    assert metadata["crop_resolution"].tolist() == [[256, 256]] * 2
    assert sorted(metadata["original_resolution"].tolist()) == [[512, 512], [700, 700]]
    assert metadata["crop_offset"].tolist() == [[0, 0]] * 2


def test_video_batch_is_as_documented(tmp_path):
    cache = make_video_cache(tmp_path, {(128, 64, 9): 3, (128, 64, 17): 2})
    loader, _ = build_videos(cache_dir=cache, batch_size=2, drop_last=False, num_workers=0)
    shapes = Counter()
    for batch in loader:
        assert set(batch) == {"video_latents", "text_embeddings", "text_mask", "data_type"}
        assert batch["data_type"] == "video"
        assert batch["text_embeddings"].shape[1:] == (7, 8)
        assert batch["text_mask"].shape[1:] == (7,)
        shapes[tuple(batch["video_latents"].shape)] += 1
    assert shapes == {(2, 4, 3, 8, 16): 1, (1, 4, 3, 8, 16): 1, (2, 4, 5, 8, 16): 1}


def test_tokens_for_training_the_text_encoder(nemo_image_cache):
    loader, _ = build_images(cache_dir=nemo_image_cache, train_text_encoder=True, num_workers=0)
    batch = next(iter(loader))
    assert batch["clip_tokens"].shape == (1, 77)
    assert batch["t5_tokens"].shape == (1, 512)
    assert "text_embeddings" not in batch


def test_batches_are_moved_to_the_device(image_cache):
    loader, _ = build_images(cache_dir=image_cache, batch_size=2, num_workers=0, device="meta")
    batch = next(iter(loader))
    assert batch["image_latents"].device.type == "meta"
    assert batch["metadata"]["crop_offset"].device.type == "meta"
    assert batch["metadata"]["prompts"][0].startswith("sample")


@pytest.mark.parametrize("device", ["mps", "mps:1", "xpu:3", "cuda:200", torch.device("xpu:1")])
def test_a_device_that_is_not_there(image_cache, device):
    says = rf"^device is '{device}', but this machine has (.+ and )?cpu \(torch "
    with pytest.raises(ConfigError, match=says):
        build_images(cache_dir=image_cache, num_workers=0, device=device)


@pytest.mark.parametrize(("kind", "may_return_early"), [("cuda", True), ("xpu", False), ("mps", False)])
def test_buffers_are_not_reused_before_they_are_copied(image_cache, monkeypatch, kind, may_return_early):
    loader, _ = build_images(cache_dir=image_cache, batch_size=2, num_workers=0)
    loader.device = torch.device(kind)
    copies = []

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        copies.append((device.type, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    next(iter(loader))
    assert set(copies) == {(kind, may_return_early)}


def test_samples_of_different_shapes_are_named(tmp_path):
    cache = make_image_cache(tmp_path, {(256, 256): 2})
    odd = sorted(cache.glob("256x256/*.pt"))[0]
    data = torch.load(odd, weights_only=True)
    torch.save({**data, "prompt_embeds": torch.zeros(1, 7, 9)}, odd)
    loader, _ = build_images(cache_dir=cache, batch_size=2, num_workers=0)
    with pytest.raises(CacheFileError, match=rf"{odd.name}.*prompt_embeds|prompt_embeds.*{odd.name}"):
        list(loader)

    torch.save({**data, "pooled_prompt_embeds": None}, odd)
    items = list(TextToImageDataset(cache))
    for batch in (items, items[::-1]):  # whichever comes first
        with pytest.raises(CacheFileError, match=f"{odd.name}: pooled_prompt_embeds is missing"):
            collate_fn_text_to_image(batch)

    clip = {"video_latents": torch.zeros(1, 4, 3, 8, 8), "text_embeddings": torch.zeros(1, 2, 2)}
    with pytest.raises(CacheFileError, match="sample 1 of the batch: video_latents"):
        collate_fn_video([clip, {**clip, "video_latents": torch.zeros(1, 4, 5, 8, 8)}])


# ---- state ----------------------------------------------------------------------------------


def loader_of(cache, workers, **options):
    options = {"batch_size": 2, "drop_last": False, "num_workers": workers} | options
    return build_images(cache_dir=cache, **options)[0]


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("stop_after", [0, 1, 6, 15])
def test_resume_after_any_batch(image_cache, workers, stop_after):
    assert_resumes(lambda: loader_of(image_cache, workers), stop_after)


def test_resume_with_other_workers_and_interleaved_buckets(image_cache):
    workers = iter([0, 4, 1])
    assert_resumes(lambda: loader_of(image_cache, next(workers), bucket_order="interleaved"), 5)


def test_state_counts_what_the_trainer_received(image_cache):
    loader = loader_of(image_cache, workers=2, prefetch_factor=4)
    iterator = iter(loader)
    for received in range(1, 4):
        next(iterator)
        assert loader.state_dict()["batches_yielded"] == received
        assert loader.bucket_sampler.state_dict() == loader.state_dict()


def test_looking_at_batches_of_the_sampler_does_not_move_the_loader(image_cache):
    loader = loader_of(image_cache, workers=0)
    running = iter(loader)
    for _ in range(4):
        next(running)
    assert [loader.bucket_sampler.get_batch(step) for step in range(len(loader))]
    next(running)
    assert loader.state_dict()["batches_yielded"] == 5
    resumed = loader_of(image_cache, workers=0)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.bucket_sampler.get_batch(15)
    assert len(list(resumed)) == len(loader) - 5


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("newer", ["loader", "sampler", "epoch", "state"])
def test_older_iterator_is_refused(image_cache, workers, newer):
    loader = loader_of(image_cache, workers)
    old = iter(loader)
    next(old)
    if newer == "epoch":
        loader.set_epoch(1)
    elif newer == "state":
        loader.load_state_dict(loader.state_dict())
    else:
        next(iter(loader if newer == "loader" else loader.bucket_sampler))
    with pytest.raises(StateError, match="newer iteration"):
        next(old)


def test_attributes_are_true(image_cache):
    loader, sampler = build_images(
        cache_dir=image_cache, batch_size=2, num_workers=3, prefetch_factor=5, drop_last=False
    )
    assert (loader.num_workers, loader.prefetch_factor) == (3, 5)
    assert loader.pin_memory == torch.cuda.is_available()
    assert loader.batch_sampler is sampler
    assert isinstance(loader.dataset, TextToImageDataset)
    assert len(loader) == len(sampler) == 16
    iterator = iter(loader)
    batch = next(iterator)
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("latentry_")]
    assert len(threads) == 3, "num_workers threads prefetch"
    iterator.close()
    items = loader.dataset.__getitems__(sampler.get_batch(0))
    assert_same_items(loader.collate_fn(items), batch)
    loader, _ = build_images(cache_dir=image_cache, num_workers=0, pin_memory=False)
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (0, None, False)


def test_num_workers_and_prefetch_factor_decide_what_is_prefetched(image_cache, monkeypatch):
    read = []
    original = TextToImageDataset.read_batch

    def counting(self, indices, resources=None):
        read.append(tuple(indices))
        return original(self, indices, resources)

    monkeypatch.setattr(TextToImageDataset, "read_batch", counting)
    for workers, prefetch_factor, ahead in ((0, 4, 0), (1, 4, 4), (2, 3, 6)):
        read.clear()
        iterator = iter(loader_of(image_cache, workers, prefetch_factor=prefetch_factor))
        next(iterator)
        deadline = time.monotonic() + 30
        while len(read) < 1 + ahead and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(read) == 1 + ahead
        iterator.close()


def test_another_collate_function_is_used(image_cache):
    loader = loader_of(image_cache, workers=2)
    loader.collate_fn = lambda items: [type(items), *(item["prompt"] for item in items)]
    batches = list(loader)
    assert {batch[0] for batch in batches} == {list}
    assert sorted(prompt for batch in batches for prompt in batch[1:]) == sorted(
        f"sample {i}" for i in range(29)
    )


@pytest.mark.parametrize("method", ["__getitem__", "__getitems__"])
def test_items_of_a_subclass_are_used(image_cache, monkeypatch, method):
    class Louder(TextToImageDataset):
        pass

    def change(item):
        return {**item, "prompt": item["prompt"].upper()}

    if method == "__getitem__":
        Louder.__getitem__ = lambda self, idx: change(TextToImageDataset.__getitem__(self, idx))
    else:
        Louder.__getitems__ = lambda self, indices: [
            change(item) for item in TextToImageDataset.__getitems__(self, indices)
        ]
    monkeypatch.setattr("latentry.serve.config.TextToImageDataset", Louder)
    for workers in (0, 2):
        for batch in loader_of(image_cache, workers):
            assert all(prompt.startswith("SAMPLE") for prompt in batch["metadata"]["prompts"])


def test_memory_of_batches_is_reused(tmp_path):
    cache = make_image_cache(tmp_path, {(1024, 1024): 8}, channels=16)
    loader = loader_of(cache, workers=0, batch_size=1)
    addresses = set()
    for batch in loader:
        addresses.add(batch["image_latents"].data_ptr())
        del batch
    assert len(addresses) <= 2, "the batch being read and the one the trainer has"
    kept = [batch["image_latents"] for batch in loader]
    assert len({latents.data_ptr() for latents in kept}) == 8, "memory that somebody holds is not reused"


def test_errors_from_workers_are_one_line(tmp_path):
    cache = make_image_cache(tmp_path, {(256, 256): 2})
    victim = sorted(cache.glob("256x256/*.pt"))[0]
    victim.write_bytes(b"nothing")
    with pytest.raises(CacheFileError) as raised:
        list(loader_of(cache, workers=1))
    assert str(raised.value).startswith(str(victim))
    assert "\n" not in str(raised.value)


def test_several_epochs_with_a_resume_in_the_second(image_cache):
    def prompts(batch):
        return tuple(batch["metadata"]["prompts"])

    def epochs(loader, start, stop):
        for epoch in range(start, stop):
            loader.set_epoch(epoch)
            for batch in loader:
                yield epoch, prompts(batch)

    expected = list(epochs(loader_of(image_cache, 0), 0, 3))
    loader = loader_of(image_cache, 2)
    running = epochs(loader, 0, 3)
    seen = [next(running) for _ in range(len(loader) + 4)]
    state = loader.state_dict()
    assert (state["epoch"], state["batches_yielded"]) == (1, 4)
    resumed = loader_of(image_cache, 1)
    resumed.load_state_dict(state)
    assert seen + list(epochs(resumed, 1, 3)) == expected


def test_iterating_leaves_the_global_random_state_alone(image_cache):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 1):
        list(loader_of(image_cache, workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_epoch_without_batches_is_an_error(tmp_path):
    cache = make_image_cache(tmp_path / "cache", {(256, 256): 3, (320, 192): 1})
    with pytest.raises(ConfigError, match=r"no batch.*: .*256x256 has 3 samples for batches of 4") as raised:
        build_images(cache_dir=cache, batch_size=4, num_workers=0)
    assert "320x192 has 1 sample for batches of 4" in str(raised.value)
    assert str(raised.value).endswith("choose a smaller batch size, or drop_last=False")
    with pytest.raises(ConfigError, match="on each of 2 ranks"):
        build_images(cache_dir=cache, batch_size=3, num_workers=0, dp_rank=1, dp_world_size=2)
    loader, _ = build_images(cache_dir=cache, batch_size=4, num_workers=0, drop_last=False)
    assert len(list(loader)) == 2
