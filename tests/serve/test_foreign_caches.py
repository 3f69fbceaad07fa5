"""Caches of another tool: values of rows, text of different lengths, unknown fields, sound, tiled latents."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_batches, assert_same_items, edit_json, rows_of

from latentry import verify_cache
from latentry.cache.convert import convert_cache
from latentry.errors import CacheFileError
from latentry.serve.collate import collate_fn_production, collate_fn_text_to_image, collate_fn_video
from latentry.serve.config import (
    build_text_to_image_multiresolution_dataloader,
    build_video_multiresolution_dataloader,
)
from latentry.serve.dataset import VIDEO_OPTIONAL_FIELDS, TextToImageDataset, TextToVideoDataset
from latentry.testing import make_image_cache, make_video_cache

IMAGES = {(256, 256): 3}
CLIPS = {(128, 64, 9): 3}


def change_files(cache: Path, *changes: dict[str, Any]) -> None:
    """Change the files of the rows, in order. A value of ``...`` removes the key."""
    for row, change in zip(rows_of(cache), changes, strict=True):
        data = torch.load(row["cache_file"], weights_only=True) | change
        torch.save({key: value for key, value in data.items() if value is not ...}, row["cache_file"])


def forms_of(cache: Path) -> list[Path]:
    """The cache, and the same cache packed."""
    packed = cache.parent / "packed"
    convert_cache(cache, packed)
    return [cache, packed]


def image_batch(cache: Path) -> dict[str, Any]:
    (batch,) = build_text_to_image_multiresolution_dataloader(
        cache_dir=cache, batch_size=3, shuffle=False, num_workers=0
    )[0]
    return batch


def video_batch(cache: Path, **options: Any) -> dict[str, Any]:
    (batch,) = build_video_multiresolution_dataloader(
        cache_dir=cache, batch_size=3, shuffle=False, num_workers=0, **options
    )[0]
    return batch


# ---- rows win -------------------------------------------------------------------------------


def test_rows_win_over_files(tmp_path):
    cache = make_image_cache(tmp_path / "cache", IMAGES)
    change_files(cache, {"original_resolution": ..., "prompt": ...}, {"crop_offset": ...}, {})

    def change(rows):
        rows[1] |= {"crop_offset": [3, 4], "bucket_id": None}
        rows[2] |= {"prompt": "corrected", "image_path": "/new.jpg", "bucket_id": 9, "aspect_ratio": 1.01}
        rows[2] |= {"original_resolution": [7, 8]}

    edit_json(cache / "metadata_shard_0000.json", change)
    for form in forms_of(cache):
        metadata = image_batch(form)["metadata"]
        assert metadata["prompts"] == ["sample 0", "sample 1", "corrected"]
        assert metadata["image_paths"] == ["/photos/0.jpg", "/photos/1.jpg", "/new.jpg"]
        assert metadata["bucket_ids"] == [4, 4, 9]
        assert metadata["aspect_ratios"] == [1.0, 1.0, 1.01]
        assert metadata["original_resolution"].tolist() == [[512, 512], [512, 512], [7, 8]]
        assert metadata["crop_offset"].tolist() == [[0, 0], [3, 4], [0, 0]]
        dataset = TextToImageDataset(form)
        assert dataset[2]["prompt"] == "corrected"
    assert [problem.what for problem in verify_cache(cache).problems] == [
        "bucket_id is 4, but its row says None",
        "prompt is 'sample 2', but its row says 'corrected'",
        "bucket_id is 4, but its row says 9",
    ]


def test_values_that_neither_row_nor_file_has_are_errors(tmp_path):
    cache = make_image_cache(tmp_path / "cache", IMAGES)
    change_files(cache, {"prompt": ...}, {}, {})
    edit_json(cache / "metadata_shard_0000.json", lambda rows: rows[0].pop("prompt"))
    with pytest.raises(CacheFileError, match="has no prompt"):
        TextToImageDataset(cache)[0]


def test_rows_that_change_while_the_cache_is_in_use(tmp_path):
    cache = make_image_cache(tmp_path / "cache", IMAGES)
    dataset = TextToImageDataset(cache)
    assert dataset[0]["prompt"] == "sample 0"
    (cache / "metadata_shard_0000.json").write_text("[]")
    with pytest.raises(ValueError, match=r"metadata_shard_0000.json was changed while it was in use .*open"):
        _ = dataset[1]


def test_rows_of_any_layout_are_read(tmp_path):
    """Whatever white space and characters the JSON has, every row is read in any order."""
    cache = make_image_cache(tmp_path / "cache", {(256, 256): 4})
    shard = cache / "metadata_shard_0000.json"
    edit_json(shard, lambda rows: [row.update(prompt='{"]},[{ \\ ü ' + str(i)) for i, row in enumerate(rows)])
    content = shard.read_text()
    for text in (content, content.replace("}, {", "}\r\n\t,\n\n{").replace("[{", " [\n {", 1) + " \n"):
        shard.write_text(text)
        rows = TextToImageDataset(cache).metadata
        assert [rows[i]["prompt"][-1] for i in (3, 0, 2, 1)] == ["3", "0", "2", "1"]


# ---- text of different lengths --------------------------------------------------------------


def text(length: int, width: int = 8) -> torch.Tensor:
    return torch.randn(1, length, width, generator=torch.Generator().manual_seed(length)).bfloat16()


def test_images_with_text_of_different_lengths(tmp_path):
    cache = make_image_cache(tmp_path / "cache", IMAGES)
    change_files(
        cache, {"prompt_embeds": text(3)}, {"prompt_embeds": text(17)[0]}, {"prompt_embeds": text(9)}
    )
    for form in forms_of(cache):
        batch = image_batch(form)
        assert batch["text_embeddings"].shape == (3, 24, 8)
        assert batch["text_embeddings"].dtype == torch.bfloat16
        mask = batch["text_attention_mask"]
        assert (mask.shape, mask.dtype) == ((3, 24), torch.int64)
        assert mask.sum(1).tolist() == [3, 17, 9]
        for i, length in enumerate((3, 17, 9)):
            assert torch.equal(batch["text_embeddings"][i, :length], text(length)[0])
            assert not batch["text_embeddings"][i, length:].any()
            assert mask[i, :length].all()
        dataset = TextToImageDataset(form)
        rows = list(dataset.bucket_groups["square", (256, 256)]["indices"])
        assert_same_items(collate_fn_text_to_image([dataset[i] for i in rows]), batch)
        assert "text_attention_mask" not in dataset[0]
    change_files(cache, {}, {"prompt_embeds": text(17)}, {})
    assert verify_cache(cache).problems == ()


def test_equal_lengths_are_not_padded(tmp_path):
    cache = make_image_cache(tmp_path / "cache", IMAGES)
    change_files(cache, *({"prompt_embeds": text(9)[0] if i else text(9)} for i in range(3)))
    batch = image_batch(cache)
    assert batch["text_embeddings"].shape == (3, 9, 8)
    assert "text_attention_mask" not in batch


def test_masks_of_files_are_padded_with_their_text(tmp_path):
    cache = make_image_cache(tmp_path / "cache", IMAGES)
    masks = [torch.tensor([1, 1, 0]), torch.ones(1, 5, dtype=torch.int64), torch.ones(3, dtype=torch.int64)]
    lengths = [3, 5, 3]
    files = [
        {"prompt_embeds": text(length), "text_attention_mask": mask}
        for length, mask in zip(lengths, masks, strict=True)
    ]
    change_files(cache, *files)
    assert image_batch(cache)["text_attention_mask"].tolist() == [
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
    ]
    change_files(cache, {"text_attention_mask": torch.ones(4)}, {}, {})
    with pytest.raises(CacheFileError, match="text_attention_mask has 4 positions, but prompt_embeds has 3"):
        image_batch(cache)


def test_text_of_different_widths_is_an_error(tmp_path):
    cache = make_image_cache(tmp_path / "cache", IMAGES)
    change_files(cache, {"prompt_embeds": text(3, width=9)}, {}, {})
    with pytest.raises(CacheFileError, match=r"prompt_embeds is \[7, 8\], but \[3, 9\] in"):
        image_batch(cache)


@pytest.mark.parametrize("masked", [False, True])
def test_videos_with_text_of_different_lengths(tmp_path, masked):
    cache = make_video_cache(tmp_path / "cache", CLIPS)
    files = []
    for length in (3, 17, 9):
        mask = torch.ones(1, length, dtype=torch.int64) if masked else ...
        files.append({
            "text_embeddings": text(length), "text_mask": mask, "text_embeddings_2": text(length + 1, 4),
        })  # fmt: skip
    change_files(cache, *files)
    for form in forms_of(cache):
        batch = video_batch(form)
        assert batch["text_embeddings"].shape == (3, 24, 8)
        assert batch["text_mask"].shape == (3, 24)
        assert batch["text_mask"].sum(1).tolist() == [3, 17, 9]
        assert batch["text_embeddings_2"].shape == (3, 24, 4)
        assert batch["text_mask_2"].sum(1).tolist() == [4, 18, 10]
        assert torch.equal(batch["text_embeddings"][1, :17], text(17)[0])
        dataset = TextToVideoDataset(form)
        assert_same_items(collate_fn_video([dataset[i] for i in range(3)]), batch)


# ---- sound ----------------------------------------------------------------------------------


def sound(length: int) -> dict[str, torch.Tensor]:
    return {
        "audio_latents": torch.full((1, 8, length, 16), float(length)).bfloat16(),
        "audio_text_embeddings": torch.randn(1, 7, 5).bfloat16(),
    }


def test_optional_fields_are_those_of_the_other_tool():
    assert list(VIDEO_OPTIONAL_FIELDS) == [
        "text_mask", "text_embeddings_2", "text_mask_2", "image_embeds", "audio_latents", "audio_text_embeddings",
    ]  # fmt: skip


def test_sound_arrives_in_the_batch(tmp_path):
    cache = make_video_cache(tmp_path / "cache", CLIPS)
    change_files(cache, *(sound(126) for _ in range(3)))
    for form in forms_of(cache):
        batch = video_batch(form)
        assert batch["audio_latents"].shape == (3, 8, 126, 16)
        assert batch["audio_text_embeddings"].shape == (3, 7, 5)
        assert "audio_mask" not in batch
        assert TextToVideoDataset(form)[0]["audio_latents"].shape == (1, 8, 126, 16)


def test_sound_that_is_one_position_longer_is_kept_with_a_mask(tmp_path):
    cache = make_video_cache(tmp_path / "cache", CLIPS)
    change_files(cache, sound(126), sound(127), sound(126))
    batch = video_batch(cache)
    assert batch["audio_latents"].shape == (3, 8, 127, 16)
    assert batch["audio_mask"].sum(1).tolist() == [126, 127, 126]
    assert not batch["audio_latents"][0, :, 126].any()
    assert (batch["audio_latents"][1] == 127).all()


# ---- unknown fields -------------------------------------------------------------------------


def test_unknown_fields_of_images_are_served(tmp_path, caplog):
    cache = make_image_cache(tmp_path / "cache", IMAGES)
    change_files(
        cache,
        *(
            {"depth": torch.full((1, 4, 4), i), "weight": torch.tensor(i / 2), "score": i, "tags": ["a"]}
            for i in range(3)
        ),
    )
    for form in forms_of(cache):
        batch = image_batch(form)
        assert batch["depth"].shape == (3, 1, 4, 4)
        assert batch["weight"].tolist() == [0, 0.5, 1]
        assert batch["metadata"]["score"] == [0, 1, 2]
        assert batch["metadata"]["tags"] == [["a"]] * 3
        assert "clip_tokens" not in batch
        dataset = TextToImageDataset(form)
        assert dataset[1]["score"] == 1
        flat = collate_fn_production([dataset[i] for i in range(3)])
        assert flat["score"] == [0, 1, 2]
        assert torch.equal(flat["depth"], batch["depth"])
    assert caplog.records == []
    assert_same_batches(build_text_to_image_multiresolution_dataloader, cache, tmp_path / "packed")


def test_unknown_fields_of_videos_are_served(tmp_path):
    cache = make_video_cache(tmp_path / "cache", CLIPS)
    change_files(
        cache, *({"pose": torch.full((1, 2, 3), i), "plain": torch.ones(2), "score": i} for i in range(3))
    )
    for form in forms_of(cache):
        batch = video_batch(form)
        assert batch["pose"].shape == (3, 2, 3)
        assert batch["plain"].shape == (3, 2)
        assert batch["metadata"] == {"score": [0, 1, 2]}
        assert TextToVideoDataset(form)[2]["pose"].tolist() == [[[2, 2, 2]] * 2]
    assert "metadata" not in video_batch(make_video_cache(tmp_path / "ordinary", CLIPS))


def test_unknown_fields_that_do_not_fit_are_named_once(tmp_path, caplog):
    cache = make_image_cache(tmp_path / "cache", {(256, 256): 4})
    change_files(
        cache,
        {"some": torch.ones(1), "size": torch.ones(1), "text_embeddings": torch.ones(1)},
        {"some": 5, "size": torch.ones(2), "text_embeddings": torch.ones(1)},
        {"size": torch.ones(2), "text_embeddings": torch.ones(1)},
        {"some": torch.ones(1), "size": torch.ones(1), "text_embeddings": torch.ones(1)},
    )
    loader, _ = build_text_to_image_multiresolution_dataloader(
        cache_dir=cache, batch_size=2, shuffle=False, num_workers=0
    )
    for _ in range(2):
        for batch in loader:
            assert not {"some", "size"} & batch.keys()
            assert batch["text_embeddings"].shape == (2, 7, 8)
    said = sorted(record.getMessage().partition(": ")[2] for record in caplog.records)
    assert said == [
        "size is left out of the batch: its shapes differ",
        "some is left out of the batch: not every sample has it as a tensor",
        "text_embeddings is left out of the batch: the batch has another field of this name",
    ]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_an_unknown_sparse_tensor_does_no_harm(tmp_path):
    cache = make_image_cache(tmp_path / "cache", IMAGES)
    change_files(cache, *({"graph": torch.eye(2).to_sparse_csr()} for _ in range(3)))
    assert image_batch(cache)["metadata"]["graph"][0].layout == torch.sparse_csr


# ---- HunyuanVideo ---------------------------------------------------------------------------


def hunyuan_cache(folder: Path, *sizes: tuple[int, int], model_type: str = "hunyuan") -> Path:
    """Clips of 848x480 whose latents have these sizes."""
    cache = make_video_cache(folder, {(848, 480, 5): len(sizes)})
    change_files(
        cache,
        *(
            {"video_latents": torch.randn(1, 4, 2, height, width), "model_type": model_type}
            for width, height in sizes
        ),
    )
    edit_json(cache / "metadata.json", lambda m: m.update(model_type=model_type, processor=model_type))
    return cache


@pytest.mark.parametrize("model_type", ["hunyuan", "hunyuanvideo"])
def test_tiled_latents_are_read_as_they_are_with_one_warning(tmp_path, caplog, model_type):
    cache = hunyuan_cache(tmp_path / "cache", *[(70, 39)] * 3, model_type=model_type)
    convert_cache(cache, tmp_path / "packed")
    for form in (cache, tmp_path / "packed"):
        caplog.clear()
        batch = video_batch(form, model_type="hunyuan")
        assert batch["video_latents"].shape == (3, 4, 2, 39, 70)
        dataset = TextToVideoDataset(form, model_type="hunyuanvideo")
        assert_same_items(dataset.collate_items(dataset.__getitems__([0, 1, 2])), batch)
        copy = pickle.loads(pickle.dumps(dataset))
        assert copy[0]["video_latents"].shape == (1, 4, 2, 39, 70)
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 2, "one for each dataset"
        assert "latents of the bucket 848x480 have 70x39 positions instead of 53x30" in messages[0]


def test_verify_accepts_tiled_latents(tmp_path, caplog):
    cache = hunyuan_cache(tmp_path / "cache", (70, 39), (70, 39))
    edit_json(
        cache / "metadata_shard_0000.json",
        lambda rows: [row.update(model_type="hunyuanvideo") for row in rows],
    )
    assert verify_cache(cache).problems == ()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("size", [(50, 30), (53, 29), (26, 15)])
def test_smaller_latents_are_still_errors(tmp_path, size):
    with pytest.raises(CacheFileError, match="not a scaled-down 848x480"):
        _ = TextToVideoDataset(hunyuan_cache(tmp_path, size), model_type="hunyuan")[0]


def test_other_models_have_no_tiled_latents(tmp_path):
    with pytest.raises(CacheFileError, match="not a scaled-down 848x480"):
        _ = TextToVideoDataset(hunyuan_cache(tmp_path, (70, 39), model_type="wan"))[0]


def test_a_batch_of_tiled_and_whole_latents_is_an_error(tmp_path):
    cache = hunyuan_cache(tmp_path / "cache", (70, 39), (53, 30), (70, 39))
    with pytest.raises(CacheFileError, match="all samples of a batch must have the same shape"):
        video_batch(cache, model_type="hunyuan")


@pytest.mark.parametrize(
    ("written", "asked", "warns"),
    [
        ("hunyuanvideo", "hunyuan", False),
        ("hunyuan", "hunyuanvideo", False),
        ("hunyuanvideo", "hunyuanvideo-1.5", False),
        ("HunyuanVideo", "hunyuan", False),
        ("wan22", "wan", False),
        ("wan", "hunyuanvideo", True),
    ],
)
def test_names_of_models(nemo_video_cache, caplog, written, asked, warns):
    edit_json(nemo_video_cache / "metadata.json", lambda m: m.update(model_type=written))
    dataset = TextToVideoDataset(nemo_video_cache, model_type=asked)
    assert ("was made for" in caplog.text) == warns
    assert collate_fn_video([dataset[0]], model_type=asked)["video_latents"].shape == (1, 16, 3, 12, 20)


@pytest.mark.parametrize("prompts", ["a text", [], ["x", "y"]])
def test_another_tools_prompts_are_not_our_captions(tmp_path, prompts):
    cache = make_image_cache(tmp_path / "cache", {(256, 256): 2})
    plain = TextToImageDataset(cache)[0]["prompt"]
    change_files(cache, {"prompts": prompts}, {"prompts": prompts})
    assert TextToImageDataset(cache)[0]["prompt"] == plain
