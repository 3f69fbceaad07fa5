"""Packed caches: the same samples as with one file each, in shards that any safetensors tool opens."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from helpers import PACKED, SMALL, assert_same_batches, damage, shards_of
from safetensors import safe_open

import latentry
from latentry import prepare, verify_cache
from latentry.cache.convert import convert_cache
from latentry.cache.read.buffer_pool import BufferPool
from latentry.cache.write import packed_index, packed_writer, shards
from latentry.cache.write.shards import ShardRow, write_shard
from latentry.cache.write.workspace import Workspace
from latentry.errors import (
    CacheError,
)
from latentry.processors.tiny import TinyProcessor
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import (
    assert_same_cache,
    make_image_cache,
)

build_images = latentry.build_text_to_image_multiresolution_dataloader
build_videos = latentry.build_video_multiresolution_dataloader


def test_packed_run_gives_the_same_batches_as_files(photos, tmp_path):
    files, cache = tmp_path / "files", tmp_path / "packed"
    prepare(SMALL, image_dir=photos, output_dir=files)
    result = prepare(PACKED, image_dir=photos, output_dir=cache)
    assert (result.num_encoded, result.exit_status) == (12, 0)
    assert_same_batches(build_images, files, cache, batch_size=3, num_workers=0)
    assert verify_cache(cache).exit_status == 0
    metadata = json.loads((cache / "metadata.json").read_text())
    assert (metadata["shards"], metadata["total_items"], metadata["packed"]["version"]) == ([], 12, 2)
    assert sorted(path.name for path in cache.iterdir() if path.is_file()) == [
        "metadata.json",
        "packed_index.arrow",
    ]
    assert not (cache / ".latentry").exists()


def test_safetensors_opens_shards(photos, tmp_path):
    prepare(PACKED, image_dir=photos, output_dir=tmp_path / "cache")
    dataset = TextToImageDataset(tmp_path / "cache")
    for i in range(12):
        place = dataset.index.location(i, "latents")
        with safe_open(tmp_path / "cache" / place.file, framework="pt") as shard:
            assert torch.equal(shard.get_tensor(f"{place.row}.latent"), dataset[i]["latent"])
    names = set()
    for path in shards_of(tmp_path / "cache", "text"):
        with safe_open(path, framework="pt") as shard:
            names |= {name.split(".")[1] for name in shard.keys()}  # noqa: SIM118 - not a dict
    assert names == {"prompt_embeds", "pooled_prompt_embeds"}


@pytest.fixture
def small_tasks(monkeypatch):
    monkeypatch.setattr("latentry.encode.planning.tasks._MAX_TASK_SIZE", 2)


@pytest.mark.slow
def test_resume_after_any_task_makes_the_same_cache(photos, tmp_path, small_tasks):
    undisturbed, cache = tmp_path / "undisturbed", tmp_path / "cache"
    prepare(PACKED, image_dir=photos, output_dir=undisturbed)
    stops = 0
    while True:
        seen = []

        def stop_soon(progress, seen=seen):
            if progress.phase == "encode":
                seen.append(progress.done)
                if len(seen) > 3:
                    raise KeyboardInterrupt

        try:
            prepare(PACKED, image_dir=photos, output_dir=cache, on_progress=stop_soon)
            break
        except KeyboardInterrupt:
            stops += 1
            assert stops < 12
    assert stops > 2
    assert_same_cache(cache, undisturbed)


def test_new_inputs_are_added_and_missing_ones_removed(photos, tmp_path):
    cache = tmp_path / "cache"
    removed = sorted(photos.rglob("*.jpg"))[0]
    shutil.move(removed, tmp_path / "aside.jpg")
    first = prepare(PACKED, image_dir=photos, output_dir=cache)
    before = {path: path.read_bytes() for path in cache.glob("*x*/*")}
    shutil.move(tmp_path / "aside.jpg", removed)
    second = prepare(PACKED, image_dir=photos, output_dir=cache)
    assert (first.num_encoded, second.num_encoded, second.num_already_done) == (11, 1, 11)
    assert all(path.read_bytes() == content for path, content in before.items()), "shards are immutable"
    assert len(TextToImageDataset(cache)) == 12
    for path in photos.rglob("*"):
        if path.is_file() and path != removed and path.suffix in (".jpg", ".png", ".webp"):
            path.unlink()
    third = prepare(PACKED, image_dir=photos, output_dir=cache)
    assert (third.num_already_done, third.num_removed) == (1, 11)
    assert not any(path.exists() for path in before), "shards without samples are swept away"
    assert verify_cache(cache).exit_status == 0


def test_rerun_changes_nothing(photos, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    prepare(PACKED, image_dir=photos, output_dir=cache)
    before = {path.name: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    prepare(PACKED, image_dir=photos, output_dir=cache)
    assert {path.name: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == before
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patch:  # between publishing the metadata and sweeping
        patch.setattr(Workspace, "remove_unused", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(PACKED, image_dir=photos, output_dir=stopped)
    prepare(PACKED, image_dir=photos, output_dir=stopped)
    assert_same_cache(stopped, cache)


def test_overwrite_keeps_the_shards_of_the_current_cache(photos, tmp_path, monkeypatch):
    """Even where another batch size makes other bits of the same tasks."""
    cache = tmp_path / "cache"
    prepare(PACKED, image_dir=photos, output_dir=cache)
    encode = TinyProcessor.encode_pixels
    monkeypatch.setattr(TinyProcessor, "encode_pixels", lambda self, *a: encode(self, *a) * 1.01)

    def stop(progress):
        if progress.phase == "encode" and progress.done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(PACKED, image_dir=photos, output_dir=cache, overwrite=True, on_progress=stop)
    dataset = TextToImageDataset(cache)
    [dataset[i] for i in range(12)]
    prepare(PACKED, image_dir=photos, output_dir=cache, overwrite=True)
    assert verify_cache(cache).exit_status == 0
    assert len(list(cache.glob("*x*/*"))) == len(
        {place for i in range(12) for place in dataset.samples.files(i)}
    )


def test_verify_encodes_damaged_samples_again(photos, tmp_path):
    cache = tmp_path / "cache"
    prepare(PACKED, image_dir=photos, output_dir=cache)
    path = shards_of(cache, "latents")[0]
    damage(path, -3)
    result = prepare(PACKED, image_dir=photos, output_dir=cache, verify=True)
    assert 1 <= result.num_encoded < 12
    assert verify_cache(cache).exit_status == 0
    assert len(TextToImageDataset(cache)) == 12


def test_shard_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_writer, "TARGET_SHARD_BYTES", 40_000)
    monkeypatch.setattr(packed_writer, "MIN_SHARD_BYTES", 20_000)
    monkeypatch.setattr("latentry.cache.convert.TARGET_SHARD_BYTES", 1 << 30)
    cache = make_image_cache(tmp_path / "files", {(256, 256): 60})
    convert_cache(cache, tmp_path / "packed")
    sizes = [path.stat().st_size for path in shards_of(tmp_path / "packed", "latents")]
    assert len(sizes) > 5
    assert all(20_000 <= size <= 70_000 for size in sizes), sizes
    assert_same_batches(build_images, cache, tmp_path / "packed", batch_size=7, num_workers=0)


def test_rows_and_batches_are_aligned(tmp_path):
    """By 64 bytes, whatever the sizes in between: some processors copy badly between odd places."""
    rows = [
        ShardRow({"tokens": torch.arange(77 + i), "flag": torch.ones(3, dtype=torch.bool), "big": torch.rand(9, 16)})
        for i in range(5)
    ]  # fmt: skip
    write_shard(tmp_path, ["shard.safetensors"], rows)
    assert [row.location.offset % 64 for row in rows] == [0] * 5
    assert [layout.name for layout in rows[0].layouts] == ["big", "tokens", "flag"]
    with safe_open(tmp_path / "shard.safetensors", "pt") as shard:
        for i, row in enumerate(rows):
            assert torch.equal(shard.get_tensor(f"{i}.tokens"), torch.arange(77 + i)), row.location
    memory = BufferPool()
    for size in (1 << 18, (1 << 18) + 1, 1 << 22):
        assert memory.empty((size,), torch.uint8).data_ptr() % 64 == 0


def test_caption_is_stored_once_without_padding(photos, tmp_path):
    for path in photos.rglob("*"):
        if path.suffix in (".json", ".txt", ".jsonl"):
            path.unlink()
    for path in photos.rglob("*"):
        if path.is_file():
            path.with_suffix(".txt").write_text("all the same")
    cache = tmp_path / "cache"
    prepare(PACKED, image_dir=photos, output_dir=cache)
    dataset = TextToImageDataset(cache)
    for path in shards_of(cache, "text"):
        with safe_open(path, framework="pt") as shard:
            assert {name.split(".")[0] for name in shard.keys()} == {"0"}  # noqa: SIM118 - not a dict
            assert shard.get_tensor("0.prompt_embeds").shape == (1, 3, 64), "three words"
    assert dataset[0]["prompt_embeds"].shape == (64, 64)
    assert dataset[0]["prompt_embeds"][3:].count_nonzero() == 0
    assert dataset[0]["prompt_embeds"][:3].count_nonzero() > 0


@pytest.mark.slow
def test_damaged_index_raises_and_never_crashes(both):
    path = both[1] / "packed_index.arrow"
    content = path.read_bytes()
    rng = random.Random(0)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 1, 4])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.1:
            damaged = damaged[: rng.randrange(len(damaged))]
        path.write_bytes(damaged)
        try:
            dataset = TextToImageDataset(both[1])
            for i in range(len(dataset)):
                dataset[i]
                dataset.metadata[i]
            outcomes["read"] += 1
        except CacheError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20, outcomes


def test_metadata_that_does_not_fit_the_index(both, caplog):
    path = both[1] / "metadata.json"
    metadata = json.loads(path.read_text())
    for change, says in (
        ({"version": 4}, "has version 4; this release reads versions 2 and 3"),
        ({"index": "../index.arrow"}, "leads outside"),
        ({"index": "gone.arrow"}, "is missing"),
        ({"parts": ["latents"]}, "is not the index that metadata.json describes"),
        ({"layouts": [[["latent", "F9", [1], None]]]}, "is damaged"),
        ({"layouts": [[["latent", "F16", [1 << 40], None]]]}, "is damaged"),
        ({"layouts": [[["latent", "F16", [-1, 2], None]]]}, "is damaged"),
        ({"layouts": [[["latent", "F16", [1, 3, 2], 9]]]}, "is damaged"),
        ({"parts": ["text"]}, "is damaged"),
        ({"parts": ["latents", "other"]}, "is damaged"),
        ({"block_rows": 0}, "is damaged"),
        ({"buckets": "none"}, "Expected `array`.*buckets"),
    ):
        path.write_text(json.dumps({**metadata, "packed": {**metadata["packed"], **change}}))
        with pytest.raises(CacheError, match=says):
            TextToImageDataset(both[1])
    path.write_text(json.dumps({**metadata, "total_items": 30}))
    assert len(TextToImageDataset(both[1])) == 29
    assert "says 30 items, but the cache has 29 rows" in caplog.text


def test_many_blocks(both, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_index, "BLOCK_ROWS", 4)
    convert_cache(both[0], tmp_path / "blocks")
    monkeypatch.setattr("latentry.cache.index.packed_index._BLOCKS_KEPT", 2)
    assert_same_batches(build_images, both[0], tmp_path / "blocks", batch_size=4, num_workers=0)


def test_unknown_dtype_is_refused():
    with pytest.raises(TypeError, match="complex64"):
        ShardRow({"x": torch.zeros(2, dtype=torch.complex64)})
    assert shards.checksum([b"ab", b"c"]) == shards.checksum([b"abc"])


def test_samples_of_a_truncated_shard_are_encoded_again(photos, tmp_path):
    cache = tmp_path / "cache"
    prepare(PACKED, image_dir=photos, output_dir=cache)
    shard = shards_of(cache, "latents")[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    result = prepare(PACKED, image_dir=photos, output_dir=cache)
    assert (result.num_encoded, result.num_already_done) == (1, 11)
    assert verify_cache(cache).exit_status == 0
