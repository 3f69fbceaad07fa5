"""Files that are not where the bucket says: flat caches, merged caches, moved caches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import SMALL, assert_same_batches, edit_json, rows_of

from latentry import prepare, verify_cache
from latentry.cache.convert import convert_cache
from latentry.cache.index import saved_index
from latentry.cache.locator import FileLocator, split_path
from latentry.errors import CacheError, ConfigError
from latentry.serve.config import build_text_to_image_multiresolution_dataloader
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import make_image_cache

COUNTS = {(256, 256): 3, (320, 192): 2}


def files_at(root: Path, *relative: str) -> None:
    for file in relative:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


@pytest.mark.parametrize(
    ("recorded", "present", "expected"),
    [
        ("{root}/256x256/a.pt", ["256x256/a.pt"], "256x256/a.pt"),
        ("{root}/a.pt", ["a.pt", "256x256/a.pt"], "a.pt"),
        ("{root}/part_a/256x256/a.pt", ["part_a/256x256/a.pt", "256x256/a.pt"], "part_a/256x256/a.pt"),
        ("{root}/part_a/../b/a.pt", ["b/a.pt"], "b/a.pt"),
        ("part_a/a.pt", ["part_a/a.pt", "256x256/a.pt"], "part_a/a.pt"),
        ("a.pt", ["a.pt", "256x256/a.pt"], "a.pt"),
        ("cache/part_a/a.pt", ["part_a/a.pt"], "part_a/a.pt"),
        ("/old/cache/part_a/256x256/a.pt", ["part_a/256x256/a.pt", "256x256/a.pt"], "part_a/256x256/a.pt"),
        ("/old/cache/part_a/256x256/a.pt", ["256x256/a.pt", "a.pt"], "256x256/a.pt"),
        ("/old/cache/part_a/a.pt", ["256x256/a.pt", "a.pt"], "256x256/a.pt"),
        ("/old/cache/a.pt", ["a.pt"], "a.pt"),
        ("D:\\caches\\part_a\\a.pt", ["part_a/a.pt"], "part_a/a.pt"),
        ("/old/../part_a/a.pt", ["part_a/a.pt"], "part_a/a.pt"),
        ("/old/cache/256x256/a.pt", [], "256x256/a.pt"),
        ("{root}/part_a/a.pt", [], "256x256/a.pt"),
        ("../secret/a.pt", ["../secret/a.pt"], "256x256/a.pt"),
        ("{root}/../secret/a.pt", ["../secret/a.pt"], "256x256/a.pt"),
        ("{root}_2/a.pt", ["../cache_2/a.pt"], "256x256/a.pt"),
    ],
)
def test_where_a_file_is(tmp_path, recorded, present, expected):
    root = tmp_path / "cache"
    root.mkdir()
    files_at(root, *present)
    folder, name = split_path(recorded.format(root=root))
    assert FileLocator(root).relative_file(folder, name, "256x256") == expected


def test_relative_paths_count_from_the_working_directory_too(tmp_path, monkeypatch):
    files_at(tmp_path, "cache/part_a/256x256/a.pt", "cache/256x256/a.pt")
    monkeypatch.chdir(tmp_path / "cache" / "part_a")
    assert (
        FileLocator(tmp_path / "cache").relative_file("../part_a/256x256", "a.pt", "1x1")
        == "part_a/256x256/a.pt"
    )
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert FileLocator(tmp_path / "cache").relative_file("256x256", "a.pt", "1x1") == "256x256/a.pt"


def test_a_folder_is_looked_for_once_but_a_missing_file_decides_nothing(tmp_path, monkeypatch):
    files_at(tmp_path, "part_a/b.pt", "part_a/c.pt")
    locator = FileLocator(tmp_path)
    assert locator.relative_file("/old/part_a", "missing.pt", "256x256") == "256x256/missing.pt"
    assert locator.relative_file("/old/part_a", "b.pt", "256x256") == "part_a/b.pt"
    monkeypatch.setattr("os.path.exists", lambda path: pytest.fail(f"{path} was looked for"))
    assert locator.relative_file("/old/part_a", "c.pt", "256x256") == "part_a/c.pt"


def flat(cache: Path) -> None:
    """Put all files into the cache's folder, and say so in the rows."""

    def change(rows):
        for row in rows:
            file = Path(row["cache_file"])
            file.rename(cache / file.name)
            row["cache_file"] = str(cache / file.name)

    for shard in cache.glob("metadata_shard_*.json"):
        edit_json(shard, change)
    for folder in cache.glob("*x*"):
        folder.rmdir()


def merged(folder: Path, *parts: Path) -> Path:
    """A cache whose parts are whole caches, moved into its folder."""
    rows = []
    for part in parts:
        rows += [
            {**row, "cache_file": row["cache_file"].replace(str(part), str(folder / part.name))}
            for row in rows_of(part)
        ]
        shutil.move(part, folder / part.name)
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "metadata.json").write_text(json.dumps({"total_items": len(rows), "shards": ["rows.json"]}))
    return folder


@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize("arrange", ["flat", "merged"])
def test_caches_without_bucket_folders(tmp_path, monkeypatch, arrange, move):
    monkeypatch.setattr(saved_index, "SAVE_FROM_ROWS", 1)
    expected = make_image_cache(tmp_path / "expected", COUNTS)
    prompts = [item["prompt"] for item in TextToImageDataset(expected)]
    if arrange == "flat":
        cache = make_image_cache(tmp_path / "cache", COUNTS)
        flat(cache)
        assert not list(cache.glob("*x*"))
    else:
        part_a = make_image_cache(tmp_path / "part_a", {(256, 256): 3})
        part_b = make_image_cache(tmp_path / "part_b", {(256, 256): 3, (320, 192): 1})
        cache = merged(tmp_path / "cache", part_a, part_b)
        prompts = [f"sample {i}" for i in (0, 1, 2, 0, 1, 2, 3)]
    if move:
        cache = cache.rename(tmp_path / "elsewhere")
    for _ in range(2):  # from the metadata shards, then from the saved index
        dataset = TextToImageDataset(cache)
        assert [item["prompt"] for item in dataset] == prompts
        assert [row["cache_file"] for row in dataset.metadata] == [item["cache_file"] for item in dataset]
        assert all(Path(row["cache_file"]).is_file() for row in dataset.metadata)
        assert (cache / "index.arrow").exists()
    assert str(verify_cache(cache)) == f"{len(prompts)} samples, 0 problems in {cache}"
    convert_cache(cache, tmp_path / "packed")
    assert_same_batches(build_text_to_image_multiresolution_dataloader, cache, tmp_path / "packed")


def test_rows_that_a_subclass_keeps_are_found(tmp_path):
    cache = make_image_cache(tmp_path / "cache", COUNTS)
    flat(cache)
    dataset = TextToImageDataset(cache)
    dataset.metadata = [row for row in dataset.metadata if row["prompt"] == "sample 3"]
    assert dataset[0]["prompt"] == "sample 3"


def test_parts_with_files_of_the_same_name(tmp_path):
    """Two tools may give two samples the same name; their files differ by their folder only."""
    part_a, part_b = (make_image_cache(tmp_path / name, {(256, 256): 1}) for name in ("part_a", "part_b"))
    (file,) = part_b.glob("256x256/*.pt")
    data = torch.load(file, weights_only=True)
    torch.save({**data, "latent": data["latent"] + 1}, file)
    cache = merged(tmp_path / "cache", part_a, part_b)
    first, second = TextToImageDataset(cache)
    assert torch.equal(first["latent"] + 1, second["latent"])
    with pytest.raises(ConfigError, match=r"would be the file of two samples, part_a/256x256/.* and part_b"):
        convert_cache(cache, tmp_path / "files", "pt")


def test_verify_finds_unlisted_files_beside_listed_ones(tmp_path):
    cache = make_image_cache(tmp_path / "cache", COUNTS)
    flat(cache)
    (cache / "extra.pt").touch()
    (cache / "notes.txt").touch()
    (problem,) = verify_cache(cache).problems
    assert problem.file == "extra.pt"


def test_links_out_of_the_cache_are_refused_wherever_they_are(tmp_path):
    cache = make_image_cache(tmp_path / "cache", {(256, 256): 2})
    (cache / "256x256").rename(tmp_path / "outside")
    (cache / "part_a").symlink_to(tmp_path / "outside")
    edit_json(
        cache / "metadata_shard_0000.json",
        lambda rows: [row.update(cache_file=row["cache_file"].replace("256x256", "part_a")) for row in rows],
    )
    with pytest.raises(CacheError, match="leads outside"):
        TextToImageDataset(cache)[0]


def test_a_run_finds_files_that_were_put_elsewhere(photos, tmp_path):
    cache = tmp_path / "cache"
    first = prepare(SMALL, image_dir=photos, output_dir=cache)
    part = cache / "part_a"
    part.mkdir()
    for folder in cache.glob("*x*"):
        folder.rename(part / folder.name)
    for shard in cache.glob("metadata_shard_*.json"):
        shard.write_text(shard.read_text().replace(str(cache), str(part)))
    again = prepare(SMALL, image_dir=photos, output_dir=cache)
    assert (again.num_encoded, again.num_already_done) == (0, first.num_encoded)
    assert all(Path(row["cache_file"]).parent.parent == part for row in rows_of(cache))
    assert verify_cache(cache).exit_status == 0
