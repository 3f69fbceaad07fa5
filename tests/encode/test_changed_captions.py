"""Changed captions: only text is encoded, and the cache is the one that encoding everything makes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import (
    CAPTION_LISTS,
    PACKED,
    SMALL,
    damage,
    edit_json,
    make_captioned_images,
    rows_of,
    run_main,
    stopped_after,
)
from PIL import Image

from latentry import Recipe, prepare, verify_cache
from latentry.media.video_options import VideoOptions
from latentry.processors.hunyuan import HunyuanProcessor
from latentry.processors.tiny import TinyProcessor
from latentry.serve.dataset import BaseMultiresolutionDataset, TextToImageDataset, TextToVideoDataset
from latentry.testing import make_counter_clip

FORMATS = ["pt", "safetensors", "packed"]


@pytest.fixture
def images(tmp_path):
    return make_captioned_images(tmp_path / "images")


@pytest.fixture
def encodings(monkeypatch):
    """Counts the samples whose pixels are encoded."""
    counted = []
    for processor in (TinyProcessor, HunyuanProcessor):
        original = processor.encode_pixels

        def encode(self, pixels, seeds, original=original):
            counted.extend(pixels)
            return original(self, pixels, seeds)

        monkeypatch.setattr(processor, "encode_pixels", encode)
    return counted


def change_captions(folder: Path) -> None:
    for path in folder.glob("*.txt"):
        path.write_text(f"changed {path.stem}\nand more of it")


def assert_same_files(first: Path, second: Path) -> None:
    """The same cache files with the same bytes, and the same rows."""
    contents = [{p.relative_to(c): p.read_bytes() for p in c.glob("*x*/*")} for c in (first, second)]
    assert contents[0] == contents[1]
    assert contents[0]
    rows = [
        json.dumps(list(BaseMultiresolutionDataset(c).metadata)).replace(str(c), "CACHE")
        for c in (first, second)
    ]
    assert rows[0] == rows[1]


def assert_same_samples(first: Path, second: Path, kind=TextToImageDataset) -> None:
    """All tensors and values of all samples are equal, wherever they are stored."""
    one, other = kind(first), kind(second)
    assert len(one) == len(other) > 0
    order = {row["sample_name"]: number for number, row in enumerate(other.metadata)}
    for number, row in enumerate(one.metadata):
        left, right = one.samples.load(number), other.samples.load(order[row["sample_name"]])
        assert list(left) == list(right)
        for key in left:
            same = torch.equal if isinstance(left[key], torch.Tensor) else lambda a, b: a == b
            assert same(left[key], right[key]), key


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize("lines", [False, True])
def test_changed_captions_give_the_same_cache_as_a_new_run(images, tmp_path, output_format, lines, encodings):
    recipe = replace(SMALL, output_format=output_format, caption_lines=lines)
    prepare(recipe, image_dir=images, output_dir=tmp_path / "cache")
    assert len(encodings) == len(CAPTION_LISTS)
    encodings.clear()
    change_captions(images)
    planned = prepare(recipe, image_dir=images, output_dir=tmp_path / "cache", dry_run=True)
    assert planned.num_captions_only == len(CAPTION_LISTS)
    result = prepare(recipe, image_dir=images, output_dir=tmp_path / "cache")
    assert not encodings
    assert (result.num_encoded, result.num_captions_only) == (7, 7)
    assert "7 encoded (7 of them only their captions)" in str(result)
    prepare(recipe, image_dir=images, output_dir=tmp_path / "new")
    assert_same_files(tmp_path / "cache", tmp_path / "new")
    assert verify_cache(tmp_path / "cache").problems == ()


@pytest.mark.parametrize("output_format", FORMATS)
def test_some_changed_captions(images, tmp_path, output_format, encodings):
    """New, changed and unchanged inputs in one run. New ones share tasks as if no caption had changed."""
    recipe = replace(SMALL, output_format=output_format)
    later = (images / "g.jpg").read_bytes()
    (images / "g.jpg").unlink()
    prepare(recipe, image_dir=images, output_dir=tmp_path / "cache")
    encodings.clear()
    (images / "g.jpg").write_bytes(later)
    (images / "a.txt").write_text("another caption")
    (images / "b.txt").write_text("")
    shutil.copy(images / "c.jpg", images / "d.jpg")
    result = prepare(recipe, image_dir=images, output_dir=tmp_path / "cache")
    assert (result.num_encoded, result.num_captions_only, result.num_already_done) == (4, 2, 3)
    assert len(encodings) == 2
    prepare(recipe, image_dir=images, output_dir=tmp_path / "new")
    if output_format == "packed":
        assert_same_samples(tmp_path / "cache", tmp_path / "new")
    else:
        assert_same_files(tmp_path / "cache", tmp_path / "new")


def test_where_captions_come_from_may_change(images, tmp_path, encodings, capsys):
    """Another format or key needs no ``--overwrite``."""
    prepare(SMALL, image_dir=images, output_dir=tmp_path / "cache")
    encodings.clear()
    for path in images.glob("*.jpg"):
        path.with_suffix(".json").write_text(json.dumps({"usr": f"from {path.stem}"}))
    command = ["image", "--image_dir", images, "--output_dir", tmp_path / "cache", "--max_pixels", 128 * 128]
    status, output, _ = run_main(
        capsys, *command, "--caption_format", "sidecar", "--caption_field", "usr", "--json"
    )
    assert (status, json.loads(output)["captions_only"]) == (0, 7)
    assert not encodings
    assert [row["prompt"] for row in rows_of(tmp_path / "cache")] == [
        f"from {name[0]}" for name in CAPTION_LISTS
    ]
    recorded = json.loads((tmp_path / "cache" / "metadata.json").read_text())["recipe"]
    assert (recorded["caption_format"], recorded["caption_field"]) == ("sidecar", "usr")
    status, output, _ = run_main(capsys, *command, "--caption_prefix", "x ", "--json")
    assert json.loads(output)["captions_only"] == 7


def test_cache_of_an_earlier_release_with_a_caption_field(images, tmp_path, encodings):
    """Its fingerprint depends on the caption field."""
    recipe = replace(SMALL, caption_field="usr")
    prepare(recipe, image_dir=images, output_dir=tmp_path / "cache")
    edit_json(tmp_path / "cache" / "metadata.json", lambda metadata: metadata.update(fingerprint="0" * 32))
    assert prepare(recipe, image_dir=images, output_dir=tmp_path / "cache").num_already_done == 7


def test_a_touched_file_counts_as_unchanged(images, tmp_path, encodings):
    prepare(SMALL, image_dir=images, output_dir=tmp_path / "cache")
    encodings.clear()
    change_captions(images)
    for path in images.glob("*.jpg"):
        path.touch()
    assert prepare(SMALL, image_dir=images, output_dir=tmp_path / "cache").num_captions_only == 7
    assert not encodings
    assert prepare(SMALL, image_dir=images, output_dir=tmp_path / "cache").num_already_done == 7


@pytest.mark.parametrize("recipe", [SMALL, PACKED])
def test_a_damaged_sample_is_encoded_whole(images, tmp_path, recipe, encodings):
    prepare(recipe, image_dir=images, output_dir=tmp_path / "cache")
    encodings.clear()
    for path in (tmp_path / "cache").glob("*x*/*"):
        damage(path, path.stat().st_size - 100)
    change_captions(images)
    result = prepare(recipe, image_dir=images, output_dir=tmp_path / "cache")
    assert result.failures == ()
    assert encodings
    prepare(recipe, image_dir=images, output_dir=tmp_path / "new")
    assert_same_samples(tmp_path / "cache", tmp_path / "new")


@pytest.mark.parametrize("recipe", [SMALL, replace(PACKED, caption_lines=True)])
def test_interrupted_while_captions_are_encoded(images, tmp_path, recipe, encodings):
    prepare(recipe, image_dir=images, output_dir=tmp_path / "cache")
    encodings.clear()
    change_captions(images)
    with pytest.raises(KeyboardInterrupt):
        prepare(recipe, image_dir=images, output_dir=tmp_path / "cache", on_progress=stopped_after(4))
    prepare(recipe, image_dir=images, output_dir=tmp_path / "cache")
    assert not encodings
    prepare(recipe, image_dir=images, output_dir=tmp_path / "new")
    assert_same_files(tmp_path / "cache", tmp_path / "new")


@pytest.mark.parametrize("output_format", ["meta", "safetensors", "packed"])
@pytest.mark.parametrize("mode", ["video", "frames"])
def test_changed_captions_of_videos(tmp_path, output_format, mode, encodings, hunyuan_folder):
    """The first frame and the image embeddings come from the cache as well."""
    clips = tmp_path / "clips"
    clips.mkdir()
    for name in ("a", "b"):
        make_counter_clip(clips / f"{name}.mp4", 9, size=(64, 64))
        (clips / f"{name}.txt").write_text(f"clip {name}")
    recipe = Recipe(
        processor="hunyuan" if mode == "video" else "tiny",
        model_name=str(hunyuan_folder) if mode == "video" else None,
        max_pixels=64 * 64,
        output_format=output_format,
        video=VideoOptions(mode=mode, num_frames=3, target_frames=5 if mode == "video" else None),
    )
    prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache")
    assert encodings
    encodings.clear()
    change_captions(clips)
    result = prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache")
    assert result.num_captions_only == (2 if mode == "video" else 6)
    assert not encodings
    prepare(recipe, video_dir=clips, output_dir=tmp_path / "new")
    assert_same_files(tmp_path / "cache", tmp_path / "new")
    data = TextToVideoDataset(
        tmp_path / "cache", model_type="hunyuan" if mode == "video" else "tiny"
    ).samples.load(0)
    assert ("image_embeds" in data, data.get("first_frame") is not None) == (
        (True, True) if mode == "video" else (False, False)
    )


def test_a_lost_caption_file_loses_no_sample(images, tmp_path, encodings):
    """With ``caption_required``, an input without its caption fails, but what the cache has of it stays."""
    recipe, cache = replace(SMALL, caption_required=True), tmp_path / "cache"
    first = prepare(recipe, image_dir=images, output_dir=cache)
    lost = [path.rename(tmp_path / path.name) for path in images.glob("*.txt")]
    result = prepare(recipe, image_dir=images, output_dir=cache)
    assert (len(result.failures), result.num_kept, result.num_removed) == (
        first.num_encoded,
        first.num_encoded,
        0,
    )
    assert len(rows_of(cache)) == first.num_encoded
    for path in lost:
        path.rename(images / path.name)
    encodings.clear()
    assert prepare(recipe, image_dir=images, output_dir=cache).num_already_done == first.num_encoded
    assert not encodings


def test_samples_that_are_left_out_later_are_counted(images, tmp_path):
    first = prepare(SMALL, image_dir=images, output_dir=tmp_path / "cache")
    next(images.glob("*.txt")).unlink()
    skip = replace(SMALL, caption_fallback="skip")
    for dry_run in (True, False):
        result = prepare(skip, image_dir=images, output_dir=tmp_path / "cache", dry_run=dry_run)
        assert (result.num_removed, len(result.left_out)) == (1, 1)
        assert "1 removed (input deleted, or left out by your rules)" in " ".join(str(result).split())
    assert len(rows_of(tmp_path / "cache")) == first.num_encoded - 1


def test_damage_that_was_kept_stays_known(tmp_path):
    """A row whose captions are encoded again still says that its input is damaged."""
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.radial_gradient("L").save(folder / "cut.jpg", quality=95)
    content = (folder / "cut.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(content[: len(content) // 2])
    for caption in ("one", "two"):
        (folder / "cut.txt").write_text(caption)
        prepare(SMALL, image_dir=folder, output_dir=tmp_path / "cache", damaged="keep")
        (row,) = rows_of(tmp_path / "cache")
        assert (row["prompt"], bool(row["damage"])) == (caption, True)
    assert prepare(SMALL, image_dir=folder, output_dir=tmp_path / "cache").failures[0].name == "cut.jpg"


@pytest.mark.parametrize("output_format", FORMATS)
def test_damaged_latents_are_not_taken_from_the_cache(images, tmp_path, output_format, encodings):
    recipe, cache = replace(SMALL, output_format=output_format), tmp_path / "cache"
    prepare(recipe, image_dir=images, output_dir=cache)
    prepare(recipe, image_dir=images, output_dir=tmp_path / "copy")
    change_captions(images)
    prepare(recipe, image_dir=images, output_dir=tmp_path / "fresh")
    pattern = "*.latents.safetensors" if output_format == "packed" else f"*.{output_format}"
    path = next(cache.rglob(pattern))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    encodings.clear()
    prepare(recipe, image_dir=images, output_dir=cache)
    assert encodings, "the sample whose bytes have changed is encoded again"
    assert verify_cache(cache).problems == ()
