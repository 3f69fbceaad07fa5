"""Several captions per sample: all are encoded once and stored, and every format keeps them."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
import torch
from helpers import CAPTION_LISTS, PACKED, SMALL, damage, make_captioned_images, rows_of, run_main, shards_of

from latentry import convert_cache, prepare, verify_cache
from latentry.media.video_options import VideoOptions
from latentry.processors.tiny import TinyProcessor
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import assert_same_cache, make_counter_clip

LINES = replace(SMALL, caption_lines=True)


@pytest.fixture
def images(tmp_path):
    return make_captioned_images(tmp_path / "images")


@functools.cache
def encoded(text: str) -> dict[str, torch.Tensor]:
    processor = TinyProcessor("embedded", torch.device("cpu"), torch.float32)
    return processor.encode_texts([text])


def assert_has_all_captions(data, texts) -> None:
    assert data["prompt"] == texts[0]
    assert data.get("prompts") == (texts if len(texts) > 1 else None)
    for number, text in enumerate(texts):
        for key, expected in encoded(text).items():
            assert torch.equal(data[f"{key}@{number}" if number else key], expected), (key, number)
    assert not [key for key in data if key.endswith(f"@{len(texts)}")]


@pytest.mark.parametrize("output_format", ["pt", "safetensors", "packed"])
def test_all_captions_are_stored(images, tmp_path, output_format):
    recipe = replace(LINES, output_format=output_format)
    result = prepare(recipe, image_dir=images, output_dir=tmp_path / "cache")
    assert result.num_encoded == len(CAPTION_LISTS)
    dataset = TextToImageDataset(tmp_path / "cache")
    assert dataset.max_captions == 3
    for number, row in enumerate(dataset.metadata):
        texts = CAPTION_LISTS[row["source_name"]]
        assert row["prompt"] == texts[0]
        assert row.get("prompts") == (texts if len(texts) > 1 else None)
        assert_has_all_captions(dataset.samples.load(number), texts)
    assert verify_cache(tmp_path / "cache").problems == ()
    assert prepare(recipe, image_dir=images, output_dir=tmp_path / "cache").num_already_done == len(
        CAPTION_LISTS
    )


def test_the_first_caption_has_the_documented_keys(images, tmp_path):
    """A reader that knows nothing of further captions sees a file with one caption."""
    prepare(LINES, image_dir=images, output_dir=tmp_path / "several")
    one = make_captioned_images(tmp_path / "one", {name: texts[:1] for name, texts in CAPTION_LISTS.items()})
    prepare(LINES, image_dir=one, output_dir=tmp_path / "single")
    for several, single in zip(*(rows_of(tmp_path / name) for name in ("several", "single")), strict=True):
        first, second = (torch.load(row["cache_file"], weights_only=True) for row in (several, single))
        for key in second.keys() - {"image_path"}:
            if isinstance(second[key], torch.Tensor):
                assert torch.equal(first[key], second[key])
            else:
                assert first[key] == second[key]
        assert list(second) == [key for key in first if "@" not in key and key != "prompts"]


def test_a_cache_with_one_caption_per_sample_records_nothing_new(images, tmp_path):
    prepare(SMALL, image_dir=images, output_dir=tmp_path / "files")
    assert "max_captions" not in json.loads((tmp_path / "files" / "metadata.json").read_text())
    assert not any("prompts" in row for row in rows_of(tmp_path / "files"))
    convert_cache(tmp_path / "files", tmp_path / "packed")
    packed = json.loads((tmp_path / "packed" / "metadata.json").read_text())["packed"]
    assert (packed["version"], packed["parts"]) == (2, ["latents", "text"])


@pytest.mark.parametrize("output_format", ["pt", "safetensors"])
def test_round_trip_through_packed(images, tmp_path, output_format):
    files, packed, again = (tmp_path / name for name in ("files", "packed", "again"))
    prepare(replace(LINES, output_format=output_format), image_dir=images, output_dir=files)
    convert_cache(files, packed)
    header = json.loads((packed / "metadata.json").read_text())
    assert (header["packed"]["version"], header["max_captions"]) == (3, 3)
    assert header["packed"]["parts"] == ["latents", "text", "text_1", "text_2"]
    assert verify_cache(packed).problems == ()
    convert_cache(packed, again, output_format)
    assert_same_cache(files, again)


def test_equal_captions_of_a_task_share_a_shard_row(tmp_path):
    texts = {"a.jpg": ["x", "y"], "c.jpg": ["y", "z"], "e.jpg": ["z", "x"]}
    images = make_captioned_images(tmp_path / "images", {"a.jpg": texts["a.jpg"]})
    for name in ("c.jpg", "e.jpg"):
        (images / name).write_bytes((images / "a.jpg").read_bytes())
        (images / name).with_suffix(".txt").write_text("\n".join(texts[name]))
    prepare(replace(LINES, output_format="packed"), image_dir=images, output_dir=tmp_path / "cache")
    dataset = TextToImageDataset(tmp_path / "cache")
    locations = [dataset.index.entry(row).locations for row in range(3)]
    assert {(place["text"].row, place["text_1"].row) for place in locations} == {(0, 1), (1, 2), (2, 0)}
    (shard,) = shards_of(tmp_path / "cache", "text")
    assert {place[part].file for place in locations for part in ("text", "text_1")} == {
        shard.relative_to(tmp_path / "cache").as_posix()
    }


def test_videos_have_several_captions(tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    make_counter_clip(clips / "a.mp4", 9, size=(64, 64))
    (clips / "a.json").write_text(json.dumps({"caption": ["one", "two"]}))
    recipe = replace(SMALL, video=VideoOptions(), output_format="meta")
    prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache")
    (row,) = rows_of(tmp_path / "cache")
    data = torch.load(row["cache_file"], weights_only=True)
    assert data["prompts"] == ["one", "two"]
    for key, text in (("text_embeddings", "one"), ("text_embeddings@1", "two")):
        assert torch.equal(data[key], encoded(text)["prompt_embeds"])
    assert not [key for key in data if "pooled" in key]


@pytest.mark.parametrize("recipe", [SMALL, PACKED])
def test_verify_finds_a_missing_or_damaged_further_caption(images, tmp_path, recipe):
    cache = tmp_path / "cache"
    prepare(replace(recipe, caption_lines=True), image_dir=images, output_dir=cache)
    if recipe is PACKED:
        dataset = TextToImageDataset(cache)
        row = next(i for i, row in enumerate(dataset.metadata) if row["source_name"] == "f.jpg")
        place = dataset.index.location(row, "text_2")
        damage(cache / place.file, place.offset)
        assert "checksum differs" in str(verify_cache(cache))
        return
    path = next(row["cache_file"] for row in rows_of(cache) if row["source_name"] == "f.jpg")
    data = torch.load(path, weights_only=True)
    del data["prompt_embeds@2"]
    torch.save(data, path)
    assert "has 3 captions, but no prompt_embeds@2" in str(verify_cache(cache))
    torch.save({**data, "prompts": ["f one", "f two"]}, path)
    assert "prompts is ['f one', 'f two'], but its row says" in str(verify_cache(cache))


def test_flags(images, tmp_path, capsys):
    command = ["image", "--image_dir", images, "--max_pixels", 128 * 128, "--output_dir", tmp_path / "cache"]
    status, _, errors = run_main(capsys, *command, "--caption_required", "--caption_fallback", "skip")
    assert status == 1
    assert "--caption_required and --caption_fallback skip contradict each other" in errors
    (images / "b.txt").unlink()
    options = ["--caption_lines", "--caption_prefix", "photo: ", "--caption_suffix", ".", "--json"]
    status, output, _ = run_main(capsys, *command, *options, "--caption_required")
    result = json.loads(output)
    assert (status, result["encoded"]) == (2, 6)
    assert result["failures"] == [{"name": "b.jpg", "reason": "has no caption"}]
    row = next(row for row in rows_of(tmp_path / "cache") if row["source_name"] == "a.jpg")
    assert row["prompts"] == ["photo: a one.", "photo: a two.", "photo: a three."]
    status, output, _ = run_main(capsys, *command, *options, "--caption_fallback", "skip")
    result = json.loads(output)
    assert (status, result["already_done"], result["failed"], len(result["left_out"])) == (0, 6, 0, 1)
    status, output, _ = run_main(capsys, *command, *options, "--caption_fallback", "empty")
    row = next(row for row in rows_of(tmp_path / "cache") if row["source_name"] == "b.jpg")
    assert (status, row["prompt"], row["caption_source"]) == (0, "photo: .", "empty")
    assert "prompts" not in row
