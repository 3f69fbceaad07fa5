"""Loaders described by YAML: the documented targets, overrides, mistakes."""

from __future__ import annotations

import pytest
import yaml

from latentry.errors import CacheNotFoundError, ConfigError
from latentry.serve.loader import LatentDataLoader
from latentry.serve.yaml_config import from_config

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


@pytest.mark.parametrize("text", [IMAGE_YAML, VIDEO_YAML], ids=["image", "video"])
@pytest.mark.parametrize("way", ["file", "dict", "hydra", "import"])
def test_documented_yaml_loads(text, way, nemo_image_cache, nemo_video_cache, tmp_path):
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
    assert loader.num_workers == 0, "from the file"
    loader, _ = from_config(config, cache_dir=nemo_image_cache, num_workers=3)
    assert loader.num_workers == 3, "from the override"


def test_configuration_imports_nothing(tmp_path):
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
def test_mistakes_are_named(config, says, image_cache):
    if config:
        config = {k: str(image_cache) if v == "CACHE" else v for k, v in config.items()}
    with pytest.raises(ConfigError, match=says):
        from_config(config)


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.yaml cannot be read"):
        from_config(tmp_path / "train.yaml")
    (tmp_path / "train.yaml").write_text("data: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        from_config(tmp_path / "train.yaml")
    (tmp_path / "train.yaml").write_text(IMAGE_YAML)
    with pytest.raises(CacheNotFoundError, match=r"no folder .*CACHE"):
        from_config(tmp_path / "train.yaml")
