from __future__ import annotations

from collections import Counter

import pytest
import torch
import yaml
from torch.utils.data import DataLoader

import latentry
from latentry.errors import CacheFileError, CacheNotFoundError, ConfigError, StateError
from latentry.serve.collate import collate_fn_text_to_image, collate_fn_video
from latentry.serve.config import from_config
from latentry.serve.dataset import TextToImageDataset
from latentry.serve.loader import LatentDataLoader
from latentry.serve.sampler import SequentialBucketSampler
from latentry.testing import assert_resumes, make_image_cache, make_video_cache

build_images = latentry.build_text_to_image_multiresolution_dataloader
build_videos = latentry.build_video_multiresolution_dataloader

NEMO = "nemo_automodel.components.datasets.diffusion"
VIDEO_YAML = f"""
data:
  dataloader:
    _target_: {NEMO}.build_video_multiresolution_dataloader
    cache_dir: CACHE
    model_type: wan          # or "hunyuan"
    base_resolution: [512, 512]
    dynamic_batch_size: false
    shuffle: true
    drop_last: false
    num_workers: 0
"""
IMAGE_YAML = f"""
data:
  dataloader:
    _target_: {NEMO}.build_text_to_image_multiresolution_dataloader
    cache_dir: CACHE
    train_text_encoder: false
    num_workers: 0
    base_resolution: [512, 512]
    dynamic_batch_size: false
    shuffle: true
    drop_last: false
"""

# On a machine with few cores PyTorch advises against four workers; here they are the point.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


# ---- batches --------------------------------------------------------------------------------


def test_an_image_batch_is_as_documented(nemo_image_cache):
    loader, sampler = build_images(cache_dir=nemo_image_cache, batch_size=2, drop_last=False, num_workers=0)
    assert isinstance(loader, DataLoader)
    assert isinstance(sampler, SequentialBucketSampler)
    batches = list(loader)
    assert len(batches) == len(loader) == len(sampler) == 5
    batch = next(b for b in batches if len(b["image_latents"]) == 2)
    assert set(batch) == {
        "image_latents", "text_embeddings", "pooled_prompt_embeds", "clip_hidden", "data_type", "metadata"
    }  # fmt: skip
    assert batch["data_type"] == "image"
    assert batch["image_latents"].shape == (2, 16, 32, 32)
    assert batch["text_embeddings"].shape == (2, 512, 8)
    assert batch["pooled_prompt_embeds"].shape == (2, 12)
    assert batch["clip_hidden"].shape == (2, 77, 12)
    metadata = batch["metadata"]
    assert set(metadata) == {
        "prompts", "image_paths", "bucket_ids", "aspect_ratios",
        "crop_resolution", "original_resolution", "crop_offset",
    }  # fmt: skip
    assert sorted(metadata["prompts"]) == ["a test pattern number 3", "photo 02"]
    assert metadata["bucket_ids"] == [2, 2]
    assert metadata["crop_resolution"].tolist() == [[256, 256]] * 2
    assert sorted(metadata["original_resolution"].tolist()) == [[512, 512], [700, 700]]
    assert metadata["crop_offset"].tolist() == [[0, 0]] * 2


def test_a_video_batch_is_as_documented(tmp_path):
    cache = make_video_cache(tmp_path, {(128, 64, 9): 3, (128, 64, 17): 2})
    loader, _ = build_videos(cache_dir=cache, batch_size=2, drop_last=False, num_workers=0)
    shapes = Counter()
    for batch in loader:
        assert set(batch) == {"video_latents", "text_embeddings", "text_mask", "data_type"}
        assert batch["data_type"] == "video"
        assert batch["text_embeddings"].shape[1:] == (7, 8)
        assert batch["text_mask"].shape[1:] == (7,)
        shapes[tuple(batch["video_latents"].shape)] += 1
    assert shapes == {(2, 4, 3, 8, 16): 1, (1, 4, 3, 8, 16): 1, (2, 4, 5, 8, 16): 1}


def test_tokens_for_training_the_text_encoder(nemo_image_cache):
    loader, _ = build_images(cache_dir=nemo_image_cache, train_text_encoder=True, num_workers=0)
    batch = next(iter(loader))
    assert batch["clip_tokens"].shape == (1, 77)
    assert batch["t5_tokens"].shape == (1, 512)
    assert "text_embeddings" not in batch


def test_batches_can_go_to_a_device(image_cache):
    loader, _ = build_images(cache_dir=image_cache, batch_size=2, num_workers=0, device="meta")
    batch = next(iter(loader))
    assert batch["image_latents"].device.type == "meta"
    assert batch["metadata"]["crop_offset"].device.type == "meta"
    assert batch["metadata"]["prompts"][0].startswith("sample")


def test_samples_that_do_not_stack_are_named(tmp_path):
    cache = make_image_cache(tmp_path, {(256, 256): 2})
    odd = sorted(cache.glob("256x256/*.pt"))[0]
    data = torch.load(odd, weights_only=True)
    torch.save({**data, "prompt_embeds": torch.zeros(1, 9, 8)}, odd)
    loader, _ = build_images(cache_dir=cache, batch_size=2, num_workers=0)
    with pytest.raises(CacheFileError, match=rf"{odd.name}.*prompt_embeds|prompt_embeds.*{odd.name}"):
        list(loader)

    torch.save({**data, "pooled_prompt_embeds": None}, odd)
    items = list(TextToImageDataset(cache))
    for batch in (items, items[::-1]):  # whichever comes first
        with pytest.raises(CacheFileError, match=f"{odd.name}: pooled_prompt_embeds is absent"):
            collate_fn_text_to_image(batch)

    clip = {"video_latents": torch.zeros(1, 4, 3, 8, 8), "text_embeddings": torch.zeros(1, 2, 2)}
    with pytest.raises(CacheFileError, match="a sample: video_latents"):
        collate_fn_video([clip, {**clip, "video_latents": torch.zeros(1, 4, 5, 8, 8)}])


# ---- state ----------------------------------------------------------------------------------


def loader_of(cache, workers, **options):
    options = {"batch_size": 2, "drop_last": False, "num_workers": workers} | options
    return build_images(cache_dir=cache, **options)[0]


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("stop_after", [0, 1, 6, 15])
def test_a_stopped_epoch_resumes(image_cache, workers, stop_after):
    assert_resumes(lambda: loader_of(image_cache, workers), stop_after)


def test_resuming_needs_neither_the_same_workers_nor_the_same_order_of_buckets(image_cache):
    workers = iter([0, 4, 1])
    assert_resumes(lambda: loader_of(image_cache, next(workers), bucket_order="interleaved"), 5)


def test_the_state_counts_what_the_trainer_received(image_cache):
    loader = loader_of(image_cache, workers=2, prefetch_factor=4)
    iterator = iter(loader)
    for received in range(1, 4):
        next(iterator)
        assert loader.state_dict()["batches_yielded"] == received
        assert loader.bucket_sampler.state_dict() == loader.state_dict()


def test_looking_at_the_sampler_does_not_move_the_loader(image_cache):
    loader = loader_of(image_cache, workers=0)
    running = iter(loader)
    for _ in range(4):
        next(running)
    list(loader.bucket_sampler)
    next(running)
    assert loader.state_dict()["batches_yielded"] == 5
    resumed = loader_of(image_cache, workers=0)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed.bucket_sampler)) == len(loader) - 5
    assert len(list(resumed)) == len(loader) - 5


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_left_behind_is_refused(image_cache, workers):
    loader = loader_of(image_cache, workers)
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(StateError, match="newer iteration"):
        next(old)


def test_errors_from_workers_are_one_line(tmp_path):
    cache = make_image_cache(tmp_path, {(256, 256): 2})
    victim = sorted(cache.glob("256x256/*.pt"))[0]
    victim.write_bytes(b"nothing")
    with pytest.raises(CacheFileError) as raised:
        list(loader_of(cache, workers=1))
    assert str(raised.value).startswith(str(victim))
    assert "\n" not in str(raised.value)


def test_several_epochs_with_a_resume_in_the_second(image_cache):
    def prompts(batch):
        return tuple(batch["metadata"]["prompts"])

    def epochs(loader, start, stop):
        for epoch in range(start, stop):
            loader.set_epoch(epoch)
            for batch in loader:
                yield epoch, prompts(batch)

    expected = list(epochs(loader_of(image_cache, 0), 0, 3))
    loader = loader_of(image_cache, 2)
    running = epochs(loader, 0, 3)
    seen = [next(running) for _ in range(len(loader) + 4)]
    state = loader.state_dict()
    assert (state["epoch"], state["batches_yielded"]) == (1, 4)
    resumed = loader_of(image_cache, 1)
    resumed.load_state_dict(state)
    assert seen + list(epochs(resumed, 1, 3)) == expected


def test_iterating_leaves_the_global_random_state_alone(image_cache):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 1):
        list(loader_of(image_cache, workers))
    assert torch.equal(torch.get_rng_state(), before)


# ---- configuration --------------------------------------------------------------------------


@pytest.mark.parametrize("text", [IMAGE_YAML, VIDEO_YAML], ids=["image", "video"])
@pytest.mark.parametrize("way", ["file", "dict", "hydra", "import"])
def test_the_documented_yaml_loads(text, way, nemo_image_cache, nemo_video_cache, tmp_path):
    cache = nemo_image_cache if text is IMAGE_YAML else nemo_video_cache
    text = text.replace("CACHE", str(cache))
    config = yaml.safe_load(text)
    if way == "file":
        path = tmp_path / "train.yaml"
        path.write_text(text)
        loader, _ = from_config(path)
    elif way == "dict":
        loader, _ = from_config(config)
    elif way == "hydra":
        from hydra.utils import instantiate
        from omegaconf import OmegaConf

        loader, _ = instantiate(OmegaConf.create(config).data.dataloader)
    else:
        import importlib

        arguments = dict(config["data"]["dataloader"])
        module, _, name = arguments.pop("_target_").rpartition(".")
        loader, _ = getattr(importlib.import_module(module), name)(**arguments)
    assert isinstance(loader, LatentDataLoader)
    assert len(list(loader)) == len(loader.dataset)


def test_overrides_replace_and_add(nemo_image_cache):
    config = yaml.safe_load(IMAGE_YAML)
    loader, sampler = from_config(
        config, cache_dir=nemo_image_cache, batch_size=2, dp_rank=1, dp_world_size=2, seed=7
    )
    assert (sampler.base_batch_size, sampler.rank, sampler.num_replicas, sampler.seed) == (2, 1, 2, 7)
    assert sampler.drop_last is False
    assert loader.num_workers == 0


def test_a_configuration_imports_nothing(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    for target in ("evil.build", "os.system", None, ["x"]):
        with pytest.raises(ConfigError, match=r"allowed are latentry\.build_text_to_image"):
            from_config({"_target_": target, "cache_dir": str(tmp_path)})


TARGET = {"_target_": "latentry.build_text_to_image_multiresolution_dataloader"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {**TARGET, "cache_dir": "CACHE", "batchsize": 2},
            "no parameter 'batchsize'; did you mean 'batch_size'",
        ),
        (TARGET, "cache_dir is missing"),
        ({"model": {}}, "no 'data: dataloader:' section"),
        ({"data": {"dataloader": None}}, "no 'data: dataloader:' section"),
        ({**TARGET, "cache_dir": "CACHE", "num_workers": -1}, "num_workers is -1"),
        ({**TARGET, "cache_dir": "CACHE", "batch_size": "two"}, "batch_size is 'two'"),
        ({**TARGET, "cache_dir": "CACHE", "shuffle": "yes please"}, "shuffle is 'yes please'"),
        ({**TARGET, "cache_dir": "CACHE", "base_resolution": [512]}, r"base_resolution is \[512\]"),
        ({**TARGET, "cache_dir": "CACHE", "base_resolution": "512"}, "base_resolution is '512'"),
        ({**TARGET, "cache_dir": "CACHE", "base_resolution": 512}, "base_resolution is 512"),
        ({**TARGET, "cache_dir": None}, "cache_dir is None"),
        ({**TARGET, "cache_dir": "CACHE", "dp_rank": "0"}, "dp_rank is '0'"),
        ({**TARGET, "cache_dir": "CACHE", "device": "cdua"}, "device is 'cdua'"),
        ({**TARGET, "cache_dir": "CACHE", "train_text_encoder": "false"}, "train_text_encoder is 'false'"),
        (None, "a path or a dictionary, not None"),
    ],
)
def test_mistakes_in_a_configuration_are_named(config, says, image_cache):
    if config:
        config = {k: str(image_cache) if v == "CACHE" else v for k, v in config.items()}
    with pytest.raises(ConfigError, match=says):
        from_config(config)


def test_configuration_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.yaml cannot be read"):
        from_config(tmp_path / "train.yaml")
    (tmp_path / "train.yaml").write_text("data: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        from_config(tmp_path / "train.yaml")
    (tmp_path / "train.yaml").write_text(IMAGE_YAML)
    with pytest.raises(CacheNotFoundError, match=r"no folder .*CACHE"):
        from_config(tmp_path / "train.yaml")
