"""Runs over several folders: captions, repeats, and what happens when a folder is left out."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter

import pytest
from helpers import PACKED, SMALL, assert_same_batches, files_of, rows_of, run_main, stopped_after

import latentry
from latentry import Recipe, convert_cache, prepare, verify_cache
from latentry.errors import ConfigError, RunError
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import assert_resumes, assert_same_cache


@pytest.fixture
def folders(photos, tmp_path):
    """Two folders with five and three pictures; some names are in both."""
    first, second = tmp_path / "A", tmp_path / "B"
    shutil.copytree(photos / "home", first / "home")
    (second / "home").mkdir(parents=True)
    for path in sorted((photos / "space").glob("*.jpg"))[:2]:
        shutil.copy(path, second)
    shutil.copy(photos / "home" / "coffee.png", second / "home" / "coffee.png")
    return first, second


def prompts(cache, **options):
    loader, _ = latentry.build_text_to_image_multiresolution_dataloader(
        cache_dir=cache, batch_size=2, drop_last=False, num_workers=0, **options
    )
    return Counter(
        (path, prompt)
        for batch in loader
        for path, prompt in zip(batch["metadata"]["image_paths"], batch["metadata"]["prompts"], strict=True)
    )


def test_two_folders_make_one_cache(folders, tmp_path, capsys):
    first, second = folders
    (second / "captions.jsonl").write_text(
        json.dumps({"file_name": "home/coffee.png", "internvl": "in B"}) + "\n"
    )
    # A list above both folders, and one in A that names a file of B, must not be found.
    for place in (tmp_path, first):
        (place / "all.jsonl").write_text(
            json.dumps({"file_name": "B/home/coffee.png", "internvl": "wrong"})
            + "\n"
            + json.dumps({"file_name": "../B/home/coffee.png", "internvl": "wrong"})
        )
    command = ["image", "--image_dir", first, second, "--output_dir", tmp_path / "cache"]
    status, out, err = run_main(capsys, *command, "--max_pixels", 128 * 128, "--json")
    assert status == 0, err
    rows = {row["source_name"]: row for row in rows_of(tmp_path / "cache")}
    num_first = len([p for p in first.rglob("*") if p.suffix in (".jpg", ".png")])
    assert len(rows) == num_first + 3
    assert rows["../B/home/coffee.png"]["prompt"] == "in B"
    assert rows["home/coffee.png"]["prompt"] != "in B"
    assert all(
        os.path.isabs(row["image_path"]) and os.path.isfile(row["image_path"]) for row in rows.values()
    )
    assert ".." not in rows["../B/home/coffee.png"]["image_path"]
    assert json.loads(out)["captions"]["jsonl"] >= 1
    # Both spellings of several folders are the same.
    again = ["image", "--image_dir", first, "--image_dir", second, "--output_dir", tmp_path / "cache"]
    status, out, err = run_main(capsys, *again, "--max_pixels", 128 * 128, "--json")
    assert (status, json.loads(out)["encoded"], json.loads(out)["already_done"]) == (0, 0, len(rows))


def test_adding_and_leaving_out_a_folder(folders, tmp_path):
    first, second = folders
    cache = tmp_path / "cache"
    alone = prepare(SMALL, image_dir=first, output_dir=cache)
    before = files_of(cache)
    added = prepare(SMALL, image_dir=[first, second], output_dir=cache)
    assert (added.num_encoded, added.num_already_done, added.num_kept) == (3, alone.num_encoded, 0)
    assert before.items() <= files_of(cache).items(), "the first folder's samples keep their files"
    without = prepare(SMALL, image_dir=[first], output_dir=cache)
    assert (without.num_already_done, without.num_kept, without.num_removed) == (alone.num_encoded, 3, 0)
    assert "3 kept (not among this run's inputs)" in str(without)
    assert len(rows_of(cache)) == alone.num_encoded + 3
    assert sum(without.buckets.values()) == alone.num_encoded + 3
    planned = prepare(SMALL, image_dir=[first], output_dir=cache, dry_run=True)
    assert (planned.num_kept, dict(planned.buckets)) == (3, dict(without.buckets))
    shutil.rmtree(second)
    gone = prepare(SMALL, image_dir=first, output_dir=cache)
    assert (gone.num_kept, gone.num_removed) == (0, 3)
    assert files_of(cache) == before


def test_folders_in_another_order_are_refused(folders, tmp_path):
    first, second = folders
    prepare(SMALL, image_dir=[first, second], output_dir=tmp_path / "cache")
    shutil.rmtree(second / "home")
    (second / "home").mkdir()
    shutil.copy(next(second.glob("*.jpg")), second / "home" / "other.jpg")
    with pytest.raises(RunError, match="give the folders in the same order as before"):
        prepare(SMALL, image_dir=[second, first], output_dir=tmp_path / "cache")


def test_folders_that_are_moved_together_stay_done(folders, tmp_path):
    first, second = folders
    prepare(SMALL, image_dir=[first, second], output_dir=tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    moved = [path.rename(tmp_path / "elsewhere" / path.name) for path in folders]
    result = prepare(SMALL, image_dir=moved, output_dir=tmp_path / "cache")
    assert (result.num_encoded, result.num_removed) == (0, 0)
    assert all(os.path.isfile(row["image_path"]) for row in rows_of(tmp_path / "cache"))


def test_output_inside_the_second_folder_is_skipped(folders):
    first, second = folders
    counts = []
    for _ in range(2):
        result = prepare(SMALL, image_dir=[first, second], output_dir=second / "cache")
        counts.append((result.num_encoded + result.num_already_done, dict(result.ignored)))
    assert counts[0] == counts[1]


def test_max_files_goes_folder_by_folder(folders, tmp_path):
    first, second = folders
    result = prepare(
        SMALL, image_dir=[first, second], output_dir=tmp_path / "cache", max_files=1, dry_run=True
    )
    assert result.num_encoded == 1
    whole = prepare(SMALL, image_dir=[first, second], output_dir=tmp_path / "cache", dry_run=True)
    beyond = sum(result.ignored.get(ending, 0) for ending in (".jpg", ".png"))
    assert beyond == whole.num_encoded - 1, "files that the limit leaves out are counted too"


def test_everything_not_taken_is_in_the_summary(photos, tmp_path, capsys):
    whole = prepare(SMALL, image_dir=photos, output_dir=tmp_path / "x", dry_run=True)
    assert not whole.ignored, f"the examples have nothing but pictures and captions, not {whole.ignored}"
    for i in range(299):
        (photos / f"{i}.psd").write_bytes(b"8BPS")
    (photos / "README").write_text("hello")
    (photos / ".hidden.jpg").write_bytes(b"x")
    (photos / "unused.txt").write_text("beside no picture")
    expected = {".psd": 299, "(hidden)": 1, "(none)": 1, ".txt": 1}
    command = ["image", "--image_dir", photos, "--output_dir", tmp_path / "cache", "--max_pixels", 128 * 128]
    _, out, _ = run_main(capsys, *command, "--dry_run")
    assert "not taken, by ending: 299 .psd, 1 (hidden), 1 (none), 1 .txt" in out
    _, out, _ = run_main(capsys, *command, "--dry_run", "--json")
    assert json.loads(out)["ignored"] == expected
    _, out, _ = run_main(capsys, *command)
    assert "299 .psd" in out
    _, out, _ = run_main(capsys, *command, "--json")
    assert json.loads(out)["ignored"] == expected, "also when everything is done"


# ---- repeats --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [SMALL, PACKED], ids=["files", "packed"])
def test_repeats_per_folder(folders, tmp_path, recipe):
    cache = tmp_path / "cache"
    plain = prepare(recipe, image_dir=folders, output_dir=cache)
    assert plain.items == plain.buckets
    before = files_of(cache)
    once = prompts(cache)
    planned = prepare(recipe, image_dir=folders, output_dir=cache, repeats=[1, 3], dry_run=True)
    result = prepare(recipe, image_dir=folders, output_dir=cache, repeats=[1, 3])
    assert (result.num_encoded, planned.num_encoded) == (0, 0)
    assert files_of(cache) == before, "nothing is encoded or stored again"
    total = sum(plain.buckets.values())
    assert result.buckets == plain.buckets == planned.buckets
    assert sum(result.items.values()) == sum(planned.items.values()) == total + 2 * 3
    assert "with repeats" in str(result)
    assert "with repeats" not in str(plain)
    second = str(folders[1])
    assert prompts(cache) == Counter({key: 3 if key[0].startswith(second) else 1 for key in once})
    verified = verify_cache(cache)
    assert (verified.problems, verified.num_samples) == ((), total)
    again = prepare(recipe, image_dir=folders, output_dir=cache, repeats=[1, 3])
    assert again.items == result.items
    assert prepare(recipe, image_dir=folders, output_dir=cache).items == plain.items
    assert prompts(cache) == once, "and back"


def test_rows_without_repeats_are_as_before(folders, tmp_path):
    prepare(SMALL, image_dir=folders, output_dir=tmp_path / "plain")
    prepare(SMALL, image_dir=folders, output_dir=tmp_path / "repeated", repeats=2)
    plain, repeated = rows_of(tmp_path / "plain"), rows_of(tmp_path / "repeated")
    assert all("repeat" not in row for row in plain)
    assert [row["sample_name"] for row in repeated] == 2 * [row["sample_name"] for row in plain]
    assert [row.get("repeat", 0) for row in repeated] == [0] * len(plain) + [1] * len(plain)
    metadata = json.loads((tmp_path / "repeated" / "metadata.json").read_text())
    assert metadata["total_items"] == len(repeated)


@pytest.mark.parametrize("recipe", [SMALL, PACKED], ids=["files", "packed"])
def test_repeats_of_a_folder_that_is_left_out_stay(folders, tmp_path, recipe):
    first, second = folders
    cache = tmp_path / "cache"
    result = prepare(recipe, image_dir=[first, second], output_dir=cache, repeats=[1, 3])
    kept = prepare(recipe, image_dir=first, output_dir=cache, repeats=2)
    assert kept.num_kept == 3
    num_first = kept.num_already_done
    assert sum(kept.items.values()) == 2 * num_first + 3 * 3
    assert sum(result.items.values()) == num_first + 3 * 3


def test_repeats_survive_an_interrupted_run(folders, tmp_path):
    first, second = folders
    cache = tmp_path / "cache"
    prepare(SMALL, image_dir=[first, second], output_dir=cache, repeats=[1, 3])
    for path in second.glob("*.jpg"):
        path.with_suffix(".txt").write_text("a new caption")
    with pytest.raises(KeyboardInterrupt):
        prepare(
            SMALL, image_dir=[first, second], output_dir=cache, repeats=[1, 3], on_progress=stopped_after(1)
        )
    kept = prepare(SMALL, image_dir=first, output_dir=cache)
    assert sum(kept.items.values()) == kept.num_already_done + 3 * 3


@pytest.mark.parametrize(("made", "converted"), [("pt", "packed"), ("packed", "pt"), ("pt", "safetensors")])
def test_convert_keeps_repeats(folders, tmp_path, made, converted):
    recipe = Recipe(max_pixels=128 * 128, output_format=made)
    prepare(recipe, image_dir=folders, output_dir=tmp_path / "old", repeats=[1, 3])
    result = convert_cache(tmp_path / "old", tmp_path / "new", converted)
    assert prompts(tmp_path / "new") == prompts(tmp_path / "old")
    assert_same_batches(
        latentry.build_text_to_image_multiresolution_dataloader,
        tmp_path / "old", tmp_path / "new", batch_size=2, num_workers=0,
    )  # fmt: skip
    target = Recipe(max_pixels=128 * 128, output_format=converted)
    added = prepare(target, image_dir=folders, output_dir=tmp_path / "new", repeats=[1, 3])
    assert (added.num_encoded, added.num_already_done) == (0, result.num_samples)
    if converted == "safetensors":
        return  # plain values come back as lists, not tuples
    convert_cache(tmp_path / "new", tmp_path / "back", made)
    if made == "pt":
        assert_same_cache(tmp_path / "old", tmp_path / "back")
    else:
        sizes = [
            sorted(p.stat().st_size for p in (tmp_path / cache).glob("*x*/*")) for cache in ("old", "back")
        ]
        assert sizes[0] == sizes[1], "repeated samples share their shard rows"


@pytest.mark.parametrize("recipe", [SMALL, PACKED], ids=["files", "packed"])
def test_repeats_under_resume_and_ranks(folders, tmp_path, recipe):
    cache = tmp_path / "cache"
    prepare(recipe, image_dir=folders, output_dir=cache, repeats=[1, 3])
    assert_resumes(
        lambda: latentry.build_text_to_image_multiresolution_dataloader(
            cache_dir=cache, batch_size=1, num_workers=0
        )[0],
        4,
    )
    epoch = Counter()
    for rank in range(2):
        epoch += prompts(cache, dp_rank=rank, dp_world_size=2)
    expected = prompts(cache)
    assert epoch.keys() == expected.keys()
    # A rank may pad its last batch of a bucket, as without repeats; no sample is missing.
    assert all(epoch[key] >= count for key, count in expected.items())
    assert len(TextToImageDataset(cache)) == sum(expected.values())


def test_another_order_of_the_folders_is_explained(folders, tmp_path, capsys):
    first, second = folders
    cache = tmp_path / "cache"
    prepare(SMALL, image_dir=folders, output_dir=cache)
    before = files_of(cache)
    command = ["image", "--image_dir", second, first, "--output_dir", cache, "--max_pixels", 128 * 128]
    # The names in both folders would be found in either order.
    shutil.rmtree(second / "home")
    status, _, err = run_main(capsys, *command, "--quiet")
    assert status == 1
    assert err.strip() == (
        f"latentry: no input has the name of a sample in {cache}, and names are relative to the first folder, here "
        f"{second}; give the folders in the same order as before, choose another --output_dir, or replace that cache "
        "with --overwrite"
    )
    assert files_of(cache) == before


def test_repeats_must_fit_the_folders(folders, tmp_path):
    for repeats, message in (
        ([1, 2, 3], "3 numbers for 2 folders"),
        ([1, 0], "repeats is 0"),
        (0, "repeats is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(SMALL, image_dir=folders, output_dir=tmp_path / "cache", repeats=repeats)
    assert not (tmp_path / "cache").exists()
