"""Broken, hostile and half-written caches: each is one clear error that names the file."""

from __future__ import annotations

import os
import pickle
import shutil

import pytest
import torch
from helpers import edit_json

from latentry.cache.index import saved_index as index_module
from latentry.errors import CacheError, CacheFileError, CacheNotFoundError, MetadataError
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import make_image_cache


def edit_rows(cache, change, shard="metadata_shard_0000.json"):
    edit_json(cache / shard, change)


def a_file(cache):
    return sorted(cache.glob("256x256/*.pt"))[0]


def read_all(cache):
    dataset = TextToImageDataset(cache)
    return [dataset[i] for i in range(len(dataset))]


# ---- metadata -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("breakage", "error", "says"),
    [
        (lambda c: shutil.rmtree(c), CacheNotFoundError, "no folder"),
        (lambda c: (c / "metadata.json").unlink(), CacheNotFoundError, "no metadata.json"),
        (lambda c: (c / "metadata.json").write_text("{"), MetadataError, "metadata.json is not valid JSON"),
        (lambda c: (c / "metadata.json").write_text("[]"), MetadataError, "metadata.json: Expected `object`"),
        (lambda c: (c / "metadata.json").write_text("[" * 100_000), MetadataError, "metadata.json"),
        (lambda c: (c / "metadata.json").write_text("{}"), MetadataError, "missing required field `shards`"),
        (
            lambda c: edit_json(c / "metadata.json", lambda m: m.update(shards=[], total_items=0)),
            MetadataError,
            "empty",
        ),
        (lambda c: (c / "metadata_shard_0001.json").unlink(), CacheNotFoundError, "metadata_shard_0001.json"),
        (
            lambda c: (c / "metadata_shard_0001.json").write_text('[{"cache_file": "x'),
            MetadataError,
            "metadata_shard_0001.json is not valid JSON",
        ),
        (
            lambda c: edit_rows(c, lambda rows: rows[2].pop("cache_file")),
            MetadataError,
            r"metadata_shard_0000.json: .*`cache_file`.*row \[2\]",
        ),
        (
            lambda c: edit_rows(c, lambda rows: rows[3].pop("bucket_resolution")),
            MetadataError,
            "metadata_shard_0000.json, row 3: the row has no bucket_resolution",
        ),
        (
            lambda c: edit_rows(c, lambda rows: rows[1].update(bucket_resolution=[256])),
            MetadataError,
            r"metadata_shard_0000.json: .*row \[1\]",
        ),
        (
            lambda c: edit_rows(c, lambda rows: rows[1].update(bucket_resolution=[256, 0])),
            MetadataError,
            r"row 1: bucket_resolution is \[256, 0\]",
        ),
        (
            lambda c: edit_rows(c, lambda rows: rows[0].update(num_frames=0)),
            MetadataError,
            "row 0: num_frames is 0",
        ),
        (
            lambda c: edit_rows(c, lambda rows: rows[0].update(cache_file="/a/..")),
            MetadataError,
            "is not a file name",
        ),
    ],
)
def test_broken_metadata(nemo_image_cache, breakage, error, says):
    breakage(nemo_image_cache)
    with pytest.raises(error, match=says) as raised:
        TextToImageDataset(nemo_image_cache)
    assert isinstance(raised.value, CacheError)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("total_items", [7, 5])
def test_total_items_that_disagrees_warns_once(nemo_image_cache, caplog, total_items):
    edit_json(nemo_image_cache / "metadata.json", lambda m: m.update(total_items=total_items))
    assert len(read_all(nemo_image_cache)) == 6
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"metadata.json says {total_items} items, but the cache has 6 rows" in record.getMessage()


def test_empty_shards_are_an_empty_cache(nemo_image_cache):
    edit_json(nemo_image_cache / "metadata.json", lambda m: m.update(total_items=0))
    for shard in nemo_image_cache.glob("metadata_shard_*.json"):
        shard.write_text("[]")
    with pytest.raises(MetadataError, match="no samples"):
        TextToImageDataset(nemo_image_cache)


def test_early_caches_call_it_crop_resolution(nemo_image_cache):
    for shard in nemo_image_cache.glob("metadata_shard_*.json"):
        edit_json(
            shard, lambda rows: [r.update(crop_resolution=r.pop("bucket_resolution")) for r in rows] and None
        )
    assert len(read_all(nemo_image_cache)) == 6
    assert TextToImageDataset(nemo_image_cache).metadata[0]["cache_file"].startswith(str(nemo_image_cache))


# ---- nothing leads outside ------------------------------------------------------------------


@pytest.mark.parametrize(
    "escape", ["../../secret.pt", "/etc/passwd", "..\\..\\secret.pt", "a\0b.pt", "secret.pt"]
)
def test_rows_cannot_lead_outside(nemo_image_cache, escape):
    secret = nemo_image_cache.parent / "secret.pt"
    torch.save({"latent": torch.zeros(1)}, secret)
    edit_rows(nemo_image_cache, lambda rows: rows[0].update(cache_file=escape))
    dataset = TextToImageDataset(nemo_image_cache)
    with pytest.raises(CacheError, match=r"is missing, but|leads outside"):
        dataset[0]


def test_shard_names_cannot_lead_outside(nemo_image_cache):
    outside = nemo_image_cache.parent / "rows.json"
    shutil.copy(nemo_image_cache / "metadata_shard_0000.json", outside)
    edit_json(nemo_image_cache / "metadata.json", lambda m: m.update(shards=["../rows.json"], total_items=4))
    with pytest.raises(CacheError, match="outside"):
        TextToImageDataset(nemo_image_cache)


def test_links_cannot_lead_outside_but_the_cache_may_be_one(nemo_image_cache):
    link = nemo_image_cache.parent / "link"
    link.symlink_to(nemo_image_cache)
    assert len(read_all(link)) == 6
    victim = a_file(nemo_image_cache)
    outside = nemo_image_cache.parent / "elsewhere.pt"
    victim.rename(outside)
    victim.symlink_to(outside)
    with pytest.raises(CacheError, match="outside"):
        read_all(nemo_image_cache)


# ---- cache files ----------------------------------------------------------------------------


class Exploit:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("kind", ["raw pickle", "torch file", "old torch file"])
def test_malicious_pickles_are_refused_and_not_run(nemo_image_cache, tmp_path, kind):
    victim, marker = a_file(nemo_image_cache), tmp_path / "executed"
    if kind == "raw pickle":
        victim.write_bytes(pickle.dumps({"latent": Exploit(marker)}))
    else:
        torch.save({"latent": Exploit(marker)}, victim, _use_new_zipfile_serialization=kind == "torch file")
    with pytest.raises(CacheFileError, match=victim.name):
        read_all(nemo_image_cache)
    assert not marker.exists()


def rewrite(path, **changes):
    data = torch.load(path, weights_only=True)
    data.update(changes)
    torch.save({k: v for k, v in data.items() if v is not ...}, path)


@pytest.mark.parametrize(
    ("breakage", "error", "says"),
    [
        (lambda f: f.unlink(), CacheNotFoundError, "missing"),
        (
            lambda f: f.write_bytes(f.read_bytes()[:1000]),
            CacheFileError,
            "truncated or damaged|no cache file",
        ),
        (lambda f: f.write_bytes(f.read_bytes()[:-100]), CacheFileError, "truncated or damaged"),
        (lambda f: f.write_bytes(b""), CacheFileError, "truncated or damaged"),
        (lambda f: f.write_bytes(b"\x89PNG not a cache file"), CacheFileError, "no cache file|damaged"),
        (lambda f: (f.unlink(), f.mkdir()), CacheFileError, "cannot be read"),
        (lambda f: torch.save([1], f), CacheFileError, "holds a list"),
        (lambda f: rewrite(f, latent=torch.zeros(16, 32, 31)), CacheFileError, "not a scaled-down 256x256"),
        (lambda f: rewrite(f, latent=torch.zeros(16, 64, 32)), CacheFileError, "not a scaled-down 256x256"),
        (lambda f: rewrite(f, latent=torch.zeros(16, 0, 0)), CacheFileError, "not a scaled-down 256x256"),
        (lambda f: rewrite(f, latent=torch.zeros(2, 16, 32, 32)), CacheFileError, "3 dimensions"),
        (lambda f: rewrite(f, latent="none"), CacheFileError, "latent is a str"),
        (lambda f: rewrite(f, latent=...), CacheFileError, "has no latent"),
        (lambda f: rewrite(f, prompt_embeds=...), CacheFileError, "has no prompt_embeds"),
        (lambda f: rewrite(f, crop_offset=3), CacheFileError, "crop_offset is 3"),
        (lambda f: rewrite(f, crop_offset=("a", "b")), CacheFileError, "crop_offset is"),
        (
            lambda f: rewrite(f, crop_offset=torch.zeros(2, 2)),
            CacheFileError,
            "crop_offset is",
        ),
    ],
)
def test_broken_cache_files(nemo_image_cache, breakage, error, says):
    victim = a_file(nemo_image_cache)
    breakage(victim)
    with pytest.raises(error, match=says) as raised:
        read_all(nemo_image_cache)
    assert victim.name in str(raised.value)
    assert "\n" not in str(raised.value)


# ---- the kept index -------------------------------------------------------------------------


@pytest.fixture
def indexed_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "SAVE_FROM_ROWS", 10)
    return make_image_cache(tmp_path / "cache", {(256, 256): 12, (320, 192): 5}, shard_size=4)


def opened(cache):
    dataset = TextToImageDataset(cache)
    groups = {key: group["indices"].tolist() for key, group in dataset.bucket_groups.items()}
    files = [dataset.index.relative_file(i) for i in range(len(dataset))]
    return groups, files, dataset.sorted_bucket_keys, dataset.fingerprint


def test_a_kept_index_says_what_the_shards_say(indexed_cache, monkeypatch):
    from_shards = opened(indexed_cache)
    assert (indexed_cache / "index.arrow").exists()
    assert [p for p in indexed_cache.iterdir() if p.name.endswith(".tmp")] == []
    monkeypatch.setattr(
        "latentry.cache.index.read_index_rows", lambda *_: pytest.fail("the index was not used")
    )
    assert opened(indexed_cache) == from_shards
    moved = indexed_cache.rename(indexed_cache.parent / "moved")
    assert opened(moved) == from_shards


def test_a_stale_index_is_not_used(indexed_cache):
    opened(indexed_cache)
    edit_rows(indexed_cache, lambda rows: rows.pop())
    edit_json(indexed_cache / "metadata.json", lambda m: m.update(total_items=16))
    assert len(TextToImageDataset(indexed_cache)) == 16
    (indexed_cache / "metadata_shard_0001.json").unlink()
    with pytest.raises(CacheNotFoundError, match="metadata_shard_0001"):
        TextToImageDataset(indexed_cache)


def test_an_index_is_stale_even_if_sizes_are_equal(indexed_cache):
    opened(indexed_cache)
    edit_rows(indexed_cache, lambda rows: rows.reverse())
    dataset = TextToImageDataset(indexed_cache)
    assert dataset[0]["prompt"] == dataset.metadata[0]["prompt"]


@pytest.mark.parametrize("damage", [b"", b"ARROW1 but not really", None])
def test_a_damaged_index_is_replaced(indexed_cache, damage):
    expected = opened(indexed_cache)
    path = indexed_cache / "index.arrow"
    path.write_bytes(path.read_bytes()[:-200] if damage is None else damage)
    assert opened(indexed_cache) == expected
    assert opened(indexed_cache) == expected


def test_flipped_bits_in_an_index_never_end_the_process(indexed_cache):
    expected = opened(indexed_cache)
    path = indexed_cache / "index.arrow"
    good = path.read_bytes()
    for position in range(0, len(good), 37):
        broken = bytearray(good)
        broken[position] ^= 0x40
        path.write_bytes(broken)
        assert opened(indexed_cache) == expected, position


def test_small_caches_are_left_untouched(nemo_image_cache):
    before = sorted(nemo_image_cache.rglob("*"))
    read_all(nemo_image_cache)
    assert sorted(nemo_image_cache.rglob("*")) == before
