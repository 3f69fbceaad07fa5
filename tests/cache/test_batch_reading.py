"""Reading batches from both cache formats: same samples, no copies, memory that is reused."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from helpers import assert_same_batches, assert_same_items, edit_json

import latentry
from latentry.cache.convert import convert_cache
from latentry.cache.read.buffer_pool import BufferPool
from latentry.cache.read.read_threads import ReadThreads
from latentry.cache.read.resources import ReadResources
from latentry.errors import CacheFileError, ConfigError, StateError
from latentry.serve.collate import collate_fn_text_to_image
from latentry.serve.dataset import BaseMultiresolutionDataset, TextToImageDataset
from latentry.serve.loader import LatentDataLoader, LoaderConfig
from latentry.serve.sampler import SequentialBucketSampler
from latentry.testing import assert_resumes, make_image_cache

pytestmark = pytest.mark.torch_versions

build_images = latentry.build_text_to_image_multiresolution_dataloader


@pytest.mark.parametrize("num_workers", [0, 3])
def test_files_and_shards_give_the_same_batches(both, num_workers):
    assert_same_batches(build_images, *both, batch_size=4, num_workers=num_workers)
    assert_same_batches(build_images, *both, batch_size=4, num_workers=num_workers, train_text_encoder=True)


def test_state_of_files_is_refused_by_shards(both):
    """The samples are the same, but their rows are in another order."""
    loader, _ = build_images(cache_dir=both[0], batch_size=3, num_workers=0)
    next(iter(loader))
    other, _ = build_images(cache_dir=both[1], batch_size=3, num_workers=0)
    with pytest.raises(StateError, match="can only be loaded with the dataset it was saved with"):
        other.load_state_dict(loader.state_dict())


def test_packed_loaders_resume(both):
    for workers in (0, 2):
        assert_resumes(lambda w=workers: build_images(cache_dir=both[1], batch_size=3, num_workers=w)[0], 3)


def test_collating_columns_copies_nothing(both):
    loader, _ = build_images(cache_dir=both[1], batch_size=4, num_workers=0)
    dataset = loader.dataset
    columns = dataset.read_batch([0, 1, 2, 3])
    batch = dataset.collate(columns)
    assert batch["image_latents"].data_ptr() == columns.tensors["latent"].data_ptr()
    assert batch["text_embeddings"].data_ptr() == columns.tensors["prompt_embeds"].data_ptr()
    items = dataset.__getitems__([0, 1, 2, 3])
    mixed = loader.collate_fn([items[2], items[0]])
    assert torch.equal(mixed["image_latents"], torch.stack([items[2]["latent"], items[0]["latent"]]))


@pytest.mark.parametrize("form", [0, 1])
def test_several_threads_read_the_same_batch(both, form, tmp_path, monkeypatch):
    cache = Path(shutil.copytree(both[form], tmp_path / "cache"))
    rows = list(range(0, 29, 3))
    alone = TextToImageDataset(cache).__getitems__(rows)
    monkeypatch.setattr("latentry.cache.read.read_threads._MIN_SHARED_BYTES", 0)
    dataset = TextToImageDataset(cache)
    resources = ReadResources(threads=ReadThreads(4))
    together = dataset.read_batch(rows, resources).items()
    assert any(thread.name.startswith("latentry-read") for thread in threading.enumerate())
    for mine, reference in zip(together, alone, strict=True):
        assert mine.keys() == reference.keys()
        for key, value in reference.items():
            assert torch.equal(mine[key], value) if isinstance(value, torch.Tensor) else mine[key] == value
    path = cache / dataset.samples.file(rows[4])
    os.truncate(path, path.stat().st_size * 9 // 10)
    fresh = TextToImageDataset(cache)
    with pytest.raises(CacheFileError, match=re.escape(path.name)):
        fresh.read_batch([*rows, *range(29)], resources)


def test_subclass_keeps_some_rows_of_a_packed_cache(both):
    class Odd(TextToImageDataset):
        def _group_by_bucket(self):
            if len(self.metadata) == 29:
                self.metadata = [row for row in self.metadata if int(row["prompt"].split()[1]) % 2]
            super()._group_by_bucket()

    dataset = Odd(both[1])
    assert len(dataset) == 14
    assert sorted(int(dataset[i]["prompt"].split()[1]) for i in range(14)) == list(range(1, 29, 2))
    assert dataset.__getitems__([3])[0]["prompt"] == dataset[3]["prompt"]


def test_some_rows_have_their_own_fingerprint_and_can_be_pickled(both):
    datasets = []
    for part in (slice(0, 5), slice(5, 10)):
        dataset = TextToImageDataset(both[1])
        dataset.metadata = dataset.metadata[part]
        dataset._group_by_bucket()
        datasets.append(dataset)
    assert datasets[0].fingerprint != datasets[1].fingerprint
    copy = pickle.loads(pickle.dumps(datasets[1]))
    assert (len(copy), copy.fingerprint) == (5, datasets[1].fingerprint)
    assert_same_items(copy[3], datasets[1][3])
    assert copy.get_bucket_info() == datasets[1].get_bucket_info()
    with pytest.raises(ConfigError, match="lack packed_row"):
        datasets[0].metadata = [{"bucket_resolution": [256, 256]}]


def test_items_that_a_dataset_keeps_are_not_changed_by_the_batch(both):
    class InMemory(TextToImageDataset):
        def __getitem__(self, idx):
            self.kept = getattr(self, "kept", {})
            return self.kept.setdefault(idx, super().__getitem__(idx))

    dataset = InMemory(both[1])
    batch = collate_fn_text_to_image(dataset.__getitems__([0]))
    batch["image_latents"].zero_()
    assert dataset[0]["latent"].count_nonzero() > 0


def test_loader_serves_custom_datasets(both):
    class Own(BaseMultiresolutionDataset):
        def __getitem__(self, idx):
            return {"row": idx}

    dataset = Own(both[1])
    sampler = SequentialBucketSampler(dataset, base_batch_size=4)
    config = LoaderConfig(
        batch_size=4, dp_rank=0, dp_world_size=1, base_resolution=(256, 256), drop_last=True, shuffle=True,
        dynamic_batch_size=False, num_workers=2, pin_memory=False, prefetch_factor=2, seed=0, device=None,
        bucket_order="sequential",
    )  # fmt: skip
    loader = LatentDataLoader(
        dataset, sampler, lambda items: {"rows": [item["row"] for item in items]}, config
    )
    assert sum(len(batch["rows"]) for batch in loader) == 24


@pytest.mark.parametrize("packed_form", [False, True])
def test_plain_fields_stored_as_tensors(tmp_path, packed_form):
    cache = make_image_cache(tmp_path / "files", {(256, 256): 3})
    for path in cache.glob("*x*/*"):
        data = torch.load(path, weights_only=True)
        data |= {"original_resolution": torch.tensor([7, 8]), "aspect_ratio": torch.tensor(2.5)}
        torch.save(data, path)
    edit_json(
        cache / "metadata_shard_0000.json",
        lambda rows: [row.pop(key) for row in rows for key in ("original_resolution", "aspect_ratio")],
    )
    if packed_form:
        convert_cache(cache, tmp_path / "packed")
        cache = tmp_path / "packed"
    loader, _ = build_images(cache_dir=cache, batch_size=3, num_workers=0)
    (batch,) = loader
    assert batch["metadata"]["original_resolution"].tolist() == [[7, 8]] * 3
    assert [float(ratio) for ratio in batch["metadata"]["aspect_ratios"]] == [2.5] * 3


def test_batch_memory_is_reused_only_when_free():
    memory = BufferPool()
    first = memory.empty((8, 100_000), torch.float32)
    address = first.data_ptr()
    part = first[3]
    del first
    second = memory.empty((8, 100_000), torch.float32)
    assert second.data_ptr() != address, "a view still holds it"
    del part
    assert memory.empty((4, 200_000), torch.int32).data_ptr() == address
    assert memory.empty((2, 3), torch.bfloat16).shape == (2, 3)
    assert memory.empty((0, 3), torch.bfloat16).numel() == 0


def test_batch_memory_is_thread_safe():
    memory = BufferPool()
    problems = []

    def work(number: int) -> None:
        for _ in range(200):
            mine = memory.empty((100_000,), torch.int32).fill_(number)
            if not (mine == number).all():
                problems.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
