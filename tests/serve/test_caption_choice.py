"""Which caption of several a sample has: random by seed, epoch and sample; the first; or all."""

from __future__ import annotations

import functools
import json
import os
import pickle
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import CAPTION_LISTS, SMALL, make_captioned_images
from torch.utils.data import DataLoader

import latentry
from latentry import Recipe, convert_cache, prepare
from latentry.errors import ConfigError
from latentry.media.video_options import VideoOptions
from latentry.processors.tiny import TinyProcessor
from latentry.serve.collate import collate_fn_text_to_image, collate_fn_video
from latentry.serve.dataset import TextToImageDataset, TextToVideoDataset
from latentry.serve.sample_index import SampleIndex
from latentry.serve.sampler import SequentialBucketSampler
from latentry.testing import assert_resumes, make_counter_clip

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("captions")
    images = make_captioned_images(folder / "images")
    prepare(replace(SMALL, caption_lines=True), image_dir=images, output_dir=folder / "files")
    return folder / "files"


@pytest.fixture(scope="module")
def packed(files) -> Path:
    convert_cache(files, files.parent / "packed")
    return files.parent / "packed"


@pytest.fixture(params=["files", "packed"])
def cache(request) -> Path:
    return request.getfixturevalue(request.param)


def build(cache, **options):
    options = {"batch_size": 2, "drop_last": False, "num_workers": 0} | options
    return latentry.build_text_to_image_multiresolution_dataloader(cache_dir=cache, **options)


@functools.cache
def embeddings_of(text: str) -> torch.Tensor:
    return TinyProcessor("embedded", torch.device("cpu"), torch.float32).encode_texts([text])[
        "prompt_embeds"
    ][0]


def captions_of(batches) -> dict[str, str]:
    """Sample to caption. Each caption must come with its own embeddings."""
    found = {}
    for batch in batches:
        metadata = batch["metadata"]
        for i, (path, prompt) in enumerate(zip(metadata["image_paths"], metadata["prompts"], strict=True)):
            assert torch.equal(batch["text_embeddings"][i], embeddings_of(prompt)), prompt
            assert prompt in CAPTION_LISTS[Path(path).name]
            assert found.setdefault(Path(path).name, prompt) == prompt, "one caption per epoch"
    return found


def epochs_of(cache, num_epochs=4, **options) -> list[dict[str, str]]:
    loader, sampler = build(cache, **options)
    found = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        found.append(captions_of(loader))
    return found


def test_random_captions_are_a_function_of_seed_epoch_and_sample(files, packed):
    epochs = epochs_of(files, 8)
    assert epochs_of(packed, 8) == epochs, "files and shards give the same captions"
    seen = defaultdict(set)
    for epoch in epochs:
        for name, prompt in epoch.items():
            seen[name].add(prompt)
    assert {name: sorted(texts) for name, texts in seen.items()} == {
        name: sorted(texts) for name, texts in CAPTION_LISTS.items()
    }, "every caption comes sooner or later"
    assert epochs_of(files, 8, seed=1) != epochs
    assert (
        epochs_of(files, 8, batch_size=3, shuffle=False, num_workers=2, bucket_order="interleaved") == epochs
    )


def test_ranks_and_world_sizes_do_not_matter(cache):
    whole = epochs_of(cache)
    ranks = [epochs_of(cache, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    for epoch, expected in enumerate(whole):
        for rank in ranks:
            assert rank[epoch].items() <= expected.items()
        assert ranks[0][epoch] | ranks[1][epoch] == expected


@pytest.mark.parametrize("caption_choice", ["random", "first", "all"])
@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_resume_is_exact(cache, caption_choice, stop_after):
    assert_resumes(lambda: build(cache, caption_choice=caption_choice, num_workers=1)[0], stop_after)


def test_resume_on_another_number_of_ranks(cache):
    """What is left of the second epoch has the captions that an undisturbed run gives it."""
    expected = epochs_of(cache, 2)[1]
    states, before = [], []
    for rank in range(2):
        loader, sampler = build(cache, dp_rank=rank, dp_world_size=2, batch_size=1)
        sampler.set_epoch(1)
        iterator = iter(loader)
        before += [next(iterator), next(iterator)]
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert states[0] == states[1]
    loader, _ = build(cache)
    loader.load_state_dict(states[0])
    assert captions_of([*before, *loader]) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_plain_data_loader_with_worker_processes(cache, num_workers):
    """Indices that travel to worker processes keep what decides the caption."""
    dataset = TextToImageDataset(cache)
    sampler = SequentialBucketSampler(dataset, base_batch_size=2, drop_last=False)
    loader = DataLoader(
        dataset, batch_sampler=sampler, num_workers=num_workers, collate_fn=collate_fn_text_to_image
    )
    expected = epochs_of(cache, 2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert captions_of(loader) == expected[epoch]
    sampler.set_epoch(1)
    sampler.load_state_dict(sampler.state_dict(batches_received=2))
    assert captions_of(loader).items() <= expected[1].items()


def test_accelerate(cache):
    from accelerate import Accelerator

    expected = epochs_of(cache, 2)
    loader, sampler = build(cache)
    prepared = Accelerator(cpu=True).prepare(loader)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert captions_of(prepared) == expected[epoch]
    dataset = TextToImageDataset(cache)
    own = SequentialBucketSampler(dataset, base_batch_size=2, drop_last=False)
    plain = DataLoader(dataset, batch_sampler=own, collate_fn=collate_fn_text_to_image)
    assert captions_of(Accelerator(cpu=True).prepare(plain)) == expected[0]


def test_the_first_caption(cache):
    first = {name: texts[0] for name, texts in CAPTION_LISTS.items()}
    assert epochs_of(cache, 2, caption_choice="first") == [first, first]
    dataset = TextToImageDataset(cache)
    assert {dataset[i]["prompt"] for i in range(len(dataset))} == set(first.values()), "plain indices"


def test_index_is_an_integer():
    index = SampleIndex(7, 123)
    again = pickle.loads(pickle.dumps([index]))[0]
    assert (again, again.caption_draw, type(again)) == (7, 123, SampleIndex)
    assert index == 7
    assert hash(index) == hash(7)
    assert [10, 20, 30][SampleIndex(1, 5)] == 20
    assert f"{index}" == repr(index) == "7"


def test_one_caption_per_sample_needs_no_draw(image_cache):
    _, sampler = build(image_cache)
    assert {type(index) for batch in sampler for index in batch} == {int}
    dataset = TextToImageDataset(image_cache)
    assert not dataset.draws_captions


def test_all_captions(cache):
    loader, _ = build(cache, caption_choice="all", batch_size=4, shuffle=False)
    seen = {}
    for batch in loader:
        counts = batch["num_captions"]
        texts, pooled = batch["text_embeddings"], batch["pooled_prompt_embeds"]
        assert counts.shape == (len(counts),)
        assert texts.shape[:2] == pooled.shape[:2] == (len(counts), int(counts.max()))
        for i, (path, prompts) in enumerate(
            zip(batch["metadata"]["image_paths"], batch["metadata"]["prompts"], strict=True)
        ):
            seen[Path(path).name] = prompts
            assert len(prompts) == counts[i]
            for number, prompt in enumerate(prompts):
                assert torch.equal(texts[i, number], embeddings_of(prompt))
            assert not texts[i, len(prompts) :].any()
            assert not pooled[i, len(prompts) :].any()
    assert seen == CAPTION_LISTS
    dataset = TextToImageDataset(cache, caption_choice="all")
    items = [dataset[i] for i in range(len(dataset))]
    assert {tuple(item["prompt"]) for item in items} == {tuple(texts) for texts in CAPTION_LISTS.values()}
    for item in items:
        assert item["prompt_embeds"].shape[0] == item["num_captions"] == len(item["prompt"])


def test_all_of_a_cache_with_one_caption(image_cache):
    batch = next(iter(build(image_cache, caption_choice="all")[0]))
    one = next(iter(build(image_cache)[0]))
    assert torch.equal(batch["text_embeddings"][:, 0], one["text_embeddings"])
    assert batch["num_captions"].tolist() == [1, 1]
    tokens = next(iter(build(image_cache, caption_choice="all", train_text_encoder=True)[0]))
    assert tokens["t5_tokens"].shape == (2, 1, 7)


def test_videos(tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    texts = {"a": ["a one", "a two", "a three"], "b": ["b one"]}
    for name, captions in texts.items():
        make_counter_clip(clips / f"{name}.mp4", 9, size=(64, 64))
        (clips / f"{name}.json").write_text(json.dumps({"caption": captions}))
    recipe = Recipe(max_pixels=64 * 64, video=VideoOptions(), output_format="meta")
    prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache")
    options = {"batch_size": 2, "num_workers": 0, "shuffle": False, "model_type": "tiny"}
    build_video = latentry.build_video_multiresolution_dataloader
    (batch,) = build_video(cache_dir=tmp_path / "cache", caption_choice="all", **options)[0]
    assert batch["text_embeddings"].shape[:2] == (2, 3)
    assert batch["num_captions"].tolist() == [3, 1]
    assert torch.equal(batch["text_embeddings"][0, 2], embeddings_of("a three"))
    dataset = TextToVideoDataset(tmp_path / "cache", "tiny", caption_choice="all")
    items = collate_fn_video([dataset[0], dataset[1]])
    assert torch.equal(items["text_embeddings"], batch["text_embeddings"])
    assert torch.equal(items["num_captions"], batch["num_captions"])
    loader, sampler = build_video(cache_dir=tmp_path / "cache", **options)
    drawn = set()
    for epoch in range(12):
        sampler.set_epoch(epoch)
        (batch,) = loader
        drawn |= {
            text for text in texts["a"] if torch.equal(batch["text_embeddings"][0], embeddings_of(text))
        }
        assert torch.equal(batch["text_embeddings"][1], embeddings_of("b one"))
    assert drawn == set(texts["a"])


@pytest.mark.parametrize("form", ["files", "packed"])
def test_only_the_chosen_caption_is_read(form, request, monkeypatch):
    cache = request.getfixturevalue(form)
    dataset = TextToImageDataset(cache)
    row = next(i for i, row in enumerate(dataset.metadata) if row["source_name"] == "a.jpg")
    stored = dataset.samples.load(row)
    one = sum(v.nbytes for k, v in stored.items() if isinstance(v, torch.Tensor) and "@" not in k)
    read = []
    original = os.preadv

    def count(descriptor, buffers, offset):
        read.append(sum(len(buffer) for buffer in buffers))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", count)
    for draw in range(6):
        read.clear()
        dataset.read_batch([SampleIndex(row, draw)])
        assert 0 < sum(read) <= one


def test_repeats_of_a_sample_draw_their_own_captions(tmp_path):
    images = make_captioned_images(tmp_path / "images", {"a.jpg": ["one", "two", "three"]})
    cache = tmp_path / "files"
    prepare(replace(SMALL, caption_lines=True), image_dir=images, output_dir=cache, repeats=12)
    convert_cache(cache, tmp_path / "packed")
    found = []
    for folder in (cache, tmp_path / "packed"):
        loader, _ = build(folder, batch_size=12, shuffle=False)
        (batch,) = loader
        found.append(batch["metadata"]["prompts"])
    assert found[0] == found[1]
    assert set(found[0]) == {"one", "two", "three"}


def test_yaml_and_errors(files):
    node = {
        "_target_": "latentry.build_text_to_image_multiresolution_dataloader",
        "cache_dir": str(files),
        "caption_choice": "all",
        "num_workers": 0,
    }
    loader, _ = latentry.from_config({"data": {"dataloader": node}})
    assert "num_captions" in next(iter(loader))
    with pytest.raises(ConfigError, match="unknown caption_choice 'last'; choose one of random, first, all"):
        latentry.from_config({**node, "caption_choice": "last"})
    config = latentry.TextToImageDataloaderConfig(cache_dir=str(files), caption_choice="all", num_workers=0)
    built = config.build(dp_rank=0, dp_world_size=1, batch_size=1)
    assert "num_captions" in next(iter(built.dataloader))
