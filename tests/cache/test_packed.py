"""Packed caches: the same samples as in files of their own, in shards that any tool opens, and safely."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from helpers import EXAMPLES, assert_same_items
from safetensors import safe_open

import latentry
from latentry import Recipe, prepare, verify_cache
from latentry.cache.convert import convert_cache
from latentry.cache.read.buffer_pool import BufferPool
from latentry.cache.write import packed_index, packed_writer, shards
from latentry.cache.write.shards import ShardRow, write_shard
from latentry.cache.write.workspace import Workspace
from latentry.cli import main
from latentry.errors import (
    CacheError,
    CacheFileError,
    CacheNotFoundError,
    ConfigError,
    MetadataError,
    RunError,
)
from latentry.media.reader import VideoOptions
from latentry.processors.tiny import TinyProcessor
from latentry.serve.dataset import TextToImageDataset, TextToVideoDataset
from latentry.testing import (
    assert_same_cache,
    make_counter_clip,
    make_image_cache,
    make_video_cache,
)

build_images = latentry.build_text_to_image_multiresolution_dataloader
build_videos = latentry.build_video_multiresolution_dataloader
FILES = Recipe(max_pixels=128 * 128)
PACKED = Recipe(max_pixels=128 * 128, output_format="packed")


@pytest.fixture
def photos(tmp_path) -> Path:
    return Path(shutil.copytree(EXAMPLES, tmp_path / "photos"))


def assert_same_batches(build, first: Path, second: Path, **options) -> None:
    loaders = [build(cache_dir=c, drop_last=False, **options)[0] for c in (first, second)]
    assert len(loaders[0]) == len(loaders[1]) > 0
    for one, other in zip(*loaders, strict=True):
        assert_same_items(one, other)


def shards_of(cache: Path, part: str) -> list[Path]:
    return sorted(cache.glob(f"*x*/*.{part}.safetensors"))


# ---- encoding into shards -------------------------------------------------------------------


def test_a_run_into_shards_gives_what_a_run_into_files_gives(photos, tmp_path):
    files, cache = tmp_path / "files", tmp_path / "packed"
    prepare(FILES, image_dir=photos, output_dir=files)
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


def test_any_tool_opens_the_shards(photos, tmp_path):
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
    monkeypatch.setattr("latentry.encode.plan._MAX_TASK_SIZE", 2)


@pytest.mark.slow
def test_stopped_after_any_task_it_makes_the_same_cache(photos, tmp_path, small_tasks):
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


def test_what_is_new_is_added_and_what_is_gone_is_dropped(photos, tmp_path):
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


def test_the_same_command_again_changes_nothing(photos, tmp_path, monkeypatch):
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


def test_overwriting_leaves_the_shards_in_force_alone(photos, tmp_path, monkeypatch):
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


def test_verify_encodes_damaged_rows_again(photos, tmp_path):
    cache = tmp_path / "cache"
    prepare(PACKED, image_dir=photos, output_dir=cache)
    path = shards_of(cache, "latents")[0]
    spoil(path, -3)
    result = prepare(PACKED, image_dir=photos, output_dir=cache, verify=True)
    assert 1 <= result.num_encoded < 12
    assert verify_cache(cache).exit_status == 0
    assert len(TextToImageDataset(cache)) == 12


# ---- sizes, sharing, trimming ---------------------------------------------------------------


def test_shards_are_neither_small_nor_large(tmp_path, monkeypatch):
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


def test_a_caption_is_stored_once_and_without_its_padding(photos, tmp_path):
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


# ---- converting -----------------------------------------------------------------------------


@pytest.mark.parametrize("output_format", ["pt", "meta", "safetensors"])
def test_there_and_back_again_gives_the_same_bytes(photos, tmp_path, output_format):
    files, cache, back = tmp_path / "files", tmp_path / "packed", tmp_path / "back"
    recipe = Recipe(max_pixels=128 * 128, output_format=output_format)
    prepare(recipe, image_dir=photos, output_dir=files, shard_size=5)
    convert_cache(files, cache)
    assert TextToImageDataset(cache).fingerprint == TextToImageDataset(files).fingerprint
    convert_cache(cache, back, output_format)
    assert_same_cache(back, files)
    again = prepare(recipe, image_dir=photos, output_dir=back, shard_size=5)
    assert (again.num_encoded, again.num_already_done) == (0, 12), "and it can be gone on with"
    added = prepare(PACKED, image_dir=photos, output_dir=cache)
    assert (added.num_encoded, added.num_already_done) == (0, 12)


def test_caches_of_the_other_tool_are_packed_as_they_are(nemo_image_cache, nemo_video_cache, tmp_path):
    for source, build, family in (
        (nemo_image_cache, build_images, TextToImageDataset),
        (nemo_video_cache, build_videos, TextToVideoDataset),
    ):
        cache, back = tmp_path / f"{source.name}_packed", tmp_path / f"{source.name}_back"
        convert_cache(source, cache)
        assert_same_batches(build, source, cache, batch_size=2, num_workers=0)
        first, second = family(source), family(cache)
        assert first.get_bucket_info() == second.get_bucket_info()
        assert first.sorted_bucket_keys == second.sorted_bucket_keys
        suffix = next(source.glob("*x*/*")).suffix
        convert_cache(cache, back, suffix.lstrip("."))
        for path in source.glob("*x*/*"):
            before, after = (
                torch.load(p, weights_only=True) for p in (path, back / path.relative_to(source))
            )
            assert list(before) == list(after)
            for key, value in before.items():
                assert type(value) is type(after[key]), key
                same = (
                    torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key]
                )
                assert same, key


def test_a_stopped_conversion_goes_on(tmp_path, monkeypatch):
    source = make_image_cache(tmp_path / "files", {(256, 256): 11, (320, 192): 7}, shard_size=5)
    monkeypatch.setattr("latentry.cache.convert.TARGET_SHARD_BYTES", 3 * 8192)
    convert_cache(source, tmp_path / "undisturbed")
    stops = 0
    while True:
        seen = []

        def stop(done, total, seen=seen, already=stops):
            seen.append(done)
            if len(seen) > already + 1:
                raise KeyboardInterrupt

        try:
            convert_cache(source, tmp_path / "packed", on_progress=stop)
            break
        except KeyboardInterrupt:
            stops += 1
            assert stops < 10
            with pytest.raises(CacheNotFoundError):
                TextToImageDataset(tmp_path / "packed")
    assert stops > 2
    assert_same_cache(tmp_path / "packed", tmp_path / "undisturbed")


def test_clips_there_and_back_again(tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    make_counter_clip(clips / "a.mp4", 20, size=(96, 64))
    make_counter_clip(clips / "b.mp4", 20, size=(64, 96))
    for mode in ("video", "frames"):
        recipe = Recipe(max_pixels=64 * 64, output_format="meta", video=VideoOptions(mode=mode, num_frames=3))
        prepare(recipe, video_dir=clips, output_dir=tmp_path / mode)
        convert_cache(tmp_path / mode, tmp_path / f"{mode}_packed")
        assert verify_cache(tmp_path / f"{mode}_packed").exit_status == 0
        assert_same_batches(build_videos, tmp_path / mode, tmp_path / f"{mode}_packed", num_workers=0)
        convert_cache(tmp_path / f"{mode}_packed", tmp_path / f"{mode}_back", "meta")
        assert_same_cache(tmp_path / f"{mode}_back", tmp_path / mode)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("extra", [(1, 2)], r"extra is \[\(1, 2\)\], which packed cannot store"),
        ("extra", {"a": 1}, "which packed cannot store"),
        ("extra", float("nan"), "extra is nan"),
        ("extra", torch.zeros(2, dtype=torch.complex64), "a tensor of torch.complex64"),
        ("extra", torch.eye(2).to_sparse(), "sparse"),
        (3, 4, "a key that is not text"),
        ("latent", "none", "has neither latent nor video_latents"),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path, key, value, says):
    source = make_image_cache(tmp_path / "files", {(256, 256): 2})
    path = next(source.glob("*x*/*"))
    torch.save({**torch.load(path, weights_only=True), key: value}, path)
    with pytest.raises(CacheFileError, match=says):
        convert_cache(source, tmp_path / "packed")


def test_kinds_of_numbers_survive(tmp_path):
    source = make_image_cache(tmp_path / "files", {(256, 256): 1})
    path = next(source.glob("*x*/*"))
    odd = {
        "aspect_ratio": 1,
        "bucket_id": True,
        "more": [1, "x", None],
        "fp8": torch.ones(2).to(torch.float8_e5m2),
    }
    torch.save({**torch.load(path, weights_only=True), **odd}, path)
    convert_cache(source, tmp_path / "packed")
    convert_cache(tmp_path / "packed", tmp_path / "back", "pt")
    back = torch.load(tmp_path / "back" / path.relative_to(source), weights_only=True)
    for name, value in odd.items():
        assert type(back[name]) is type(value), name
        assert (back[name] == value) if name != "fp8" else torch.equal(back[name].float(), value.float())


def test_two_samples_never_become_one_file(tmp_path):
    source = make_image_cache(tmp_path / "files", {(256, 256): 2})
    rows = json.loads((source / "metadata_shard_0000.json").read_text())
    first, second = (Path(row["cache_file"]) for row in rows)
    second.rename(first.with_suffix(".meta"))
    rows[1]["cache_file"] = str(first.with_suffix(".meta"))
    (source / "metadata_shard_0000.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match="would be the file of two samples"):
        convert_cache(source, tmp_path / "pt", "pt")
    convert_cache(source, tmp_path / "packed")
    assert [TextToImageDataset(tmp_path / "packed")[i]["prompt"] for i in (0, 1)] == ["sample 0", "sample 1"]


def test_a_committed_shard_that_is_gone_is_written_again(tmp_path, monkeypatch):
    source = make_image_cache(tmp_path / "files", {(256, 256): 6})
    monkeypatch.setattr("latentry.cache.convert.TARGET_SHARD_BYTES", 2 * 8192)

    def stop(done, total):
        if done > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_cache(source, tmp_path / "packed", on_progress=stop)
    with pytest.raises(RunError, match="unfinished conversion; finish it first"):
        prepare(PACKED, image_dir=EXAMPLES, output_dir=tmp_path / "packed")
    shards_of(tmp_path / "packed", "latents")[0].unlink()
    convert_cache(source, tmp_path / "packed")
    assert verify_cache(tmp_path / "packed").exit_status == 0


def test_what_cannot_be_converted_is_said(tmp_path):
    source = make_image_cache(tmp_path / "files", {(256, 256): 3})
    with pytest.raises(ConfigError, match="unknown output_format 'zip'; choose one of meta"):
        convert_cache(source, tmp_path / "x", "zip")
    with pytest.raises(ConfigError, match="is the cache itself"):
        convert_cache(source, source)
    with pytest.raises(CacheNotFoundError, match="there is no folder"):
        convert_cache(tmp_path / "nothing", tmp_path / "x")
    convert_cache(source, tmp_path / "packed")
    with pytest.raises(RunError, match="already holds a finished cache"):
        convert_cache(source, tmp_path / "packed")
    next(source.glob("*x*/*")).write_bytes(b"broken")
    with pytest.raises(CacheFileError, match="damaged"):
        convert_cache(source, tmp_path / "x")


def test_the_command(tmp_path, capsys):
    source = make_video_cache(tmp_path / "files", {(832, 480, 9): 2})
    assert main(["convert", str(source), "--output-dir", str(tmp_path / "packed"), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert (
        main(
            [
                "convert",
                str(tmp_path / "packed"),
                "--output_dir",
                str(tmp_path / "b"),
                "--output_format",
                "pt",
            ]
        )
        == 0
    )
    assert "2 samples in" in capsys.readouterr().out
    assert main(["convert", str(source), "--output_dir", str(source)]) == 1
    assert (
        capsys.readouterr().err == f"latentry: {source} is the cache itself; convert it into another folder\n"
    )
    with pytest.raises(SystemExit):
        main(["convert", str(source)])
    assert "--output_dir" in capsys.readouterr().err


# ---- damage ---------------------------------------------------------------------------------


def spoil(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.slow
def test_a_damaged_index_is_an_error_and_never_a_crash(both):
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


def test_metadata_that_does_not_fit_the_index(both):
    path = both[1] / "metadata.json"
    metadata = json.loads(path.read_text())
    for change, says in (
        ({"version": 3}, "has version 3; this release reads version 2"),
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
    with pytest.raises(MetadataError, match="promises 30 items"):
        TextToImageDataset(both[1])


def test_many_blocks(both, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_index, "BLOCK_ROWS", 4)
    convert_cache(both[0], tmp_path / "blocks")
    monkeypatch.setattr("latentry.cache.index.packed_index._BLOCKS_KEPT", 2)
    assert_same_batches(build_images, both[0], tmp_path / "blocks", batch_size=4, num_workers=0)


def test_an_unknown_kind_of_tensor_is_refused():
    with pytest.raises(TypeError, match="complex64"):
        ShardRow({"x": torch.zeros(2, dtype=torch.complex64)})
    assert shards.checksum([b"ab", b"c"]) == shards.checksum([b"abc"])
