"""Configuration dataclasses, used as the training recipe of another tool uses them."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import latentry
from latentry.errors import ConfigError, StateError
from latentry.serve.yaml_config import from_config
from latentry.testing import make_image_cache, make_video_cache

NEMO = "nemo_automodel.components.datasets.diffusion"
REQUIRED = inspect.Parameter.empty


class ForeignRecipe:
    """A training recipe that knows nothing of Latentry but the name in its YAML file.

    It instantiates ``data.dataloader``, builds the loader of each rank, trains, and writes checkpoints: the state of
    each rank's dataloader in a file of its own, and the sampler's state once.
    """

    def __init__(self, config: Path, world_size: int, batch_size: int = 2) -> None:
        node = dict(yaml.safe_load(config.read_text())["data"]["dataloader"])
        module, _, name = node.pop("_target_").rpartition(".")
        settings = getattr(importlib.import_module(module), name)(**node)
        assert is_dataclass(settings)
        self.world_size = world_size
        self.builds = [
            settings.build(dp_rank=rank, dp_world_size=world_size, batch_size=batch_size)
            for rank in range(world_size)
        ]
        if not len(self.builds[0].dataloader):
            raise RuntimeError("the dataloader is empty")
        self.first_epoch = 0

    def train(self, num_epochs: int, stop_after: int | None = None) -> list[tuple[int, int, list[str]]]:
        """What each rank saw, as (epoch, rank, prompts); None trains to the end."""
        seen: list[tuple[int, int, list[str]]] = []
        step = 0
        for epoch in range(self.first_epoch, num_epochs):
            for build in self.builds:
                if build.sampler is not None:
                    build.sampler.set_epoch(epoch)
            for batches in zip(*(build.dataloader for build in self.builds), strict=True):
                assert len({batch["image_latents"].shape for batch in batches}) == 1
                for rank, batch in enumerate(batches):
                    loss = batch["image_latents"].float().mean() + batch["text_embeddings"].float().mean()
                    assert torch.isfinite(loss)
                    seen.append((epoch, rank, batch["metadata"]["prompts"]))
                step += 1
                if step == stop_after:
                    self.first_epoch = epoch
                    return seen
        return seen

    def save(self, folder: Path) -> None:
        folder.mkdir()
        for rank, build in enumerate(self.builds):
            torch.save(build.dataloader.state_dict(), folder / f"dataloader_{rank}.pt")
        torch.save(self.builds[0].sampler.state_dict(), folder / "sampler.pt")
        torch.save({"epoch": self.first_epoch}, folder / "step.pt")

    def load(self, folder: Path) -> None:
        for rank, build in enumerate(self.builds):
            build.dataloader.load_state_dict(torch.load(folder / f"dataloader_{rank}.pt", weights_only=True))
            build.sampler.load_state_dict(torch.load(folder / "sampler.pt", weights_only=True))
        self.first_epoch = torch.load(folder / "step.pt", weights_only=True)["epoch"]


@pytest.fixture
def config(tmp_path, image_cache) -> Path:
    path = tmp_path / "train.yaml"
    node = {"_target_": "latentry.TextToImageDataloaderConfig", "cache_dir": str(image_cache)}
    node |= {"num_workers": 1, "base_resolution": [256, 256], "drop_last": False}
    path.write_text(yaml.safe_dump({"data": {"dataloader": node}}))
    return path


@pytest.mark.parametrize("stop_after", [1, 5, 8, 11])
def test_another_tools_recipe_trains_and_resumes_on_two_ranks(config, tmp_path, stop_after):
    whole = ForeignRecipe(config, world_size=2).train(num_epochs=2)
    stopped = ForeignRecipe(config, world_size=2)
    before = stopped.train(num_epochs=2, stop_after=stop_after)
    stopped.save(tmp_path / "checkpoint")
    resumed = ForeignRecipe(config, world_size=2)
    resumed.load(tmp_path / "checkpoint")
    assert before + resumed.train(num_epochs=2) == whole
    assert len(before) == 2 * stop_after < len(whole)


def test_an_epoch_has_every_sample(config):
    seen = ForeignRecipe(config, world_size=2).train(num_epochs=1)
    counts = Counter(prompt for _, _, prompts in seen for prompt in prompts)
    assert len(counts) == 29
    assert max(counts.values()) == 2, "padding to two ranks repeats at most one sample per bucket"


def test_the_documented_sampler_state_is_enough(config):
    first, second = (ForeignRecipe(config, world_size=1) for _ in range(2))
    first.train(num_epochs=1, stop_after=3)
    state = first.builds[0].sampler.state_dict()
    assert {"epoch": 0, "batches_yielded": 3}.items() <= state.items()
    second.builds[0].sampler.load_state_dict({"epoch": 0, "batches_yielded": 3})
    assert len(second.train(num_epochs=1)) == len(first.builds[0].dataloader) - 3


def test_a_checkpoint_of_another_cache_is_refused(config, tmp_path):
    other = make_image_cache(tmp_path / "other", {(256, 256): 5})
    build = latentry.TextToImageDataloaderConfig(str(other)).build(dp_rank=0, dp_world_size=1, batch_size=1)
    with pytest.raises(StateError, match="fingerprint"):
        build.dataloader.load_state_dict(ForeignRecipe(config, 1).builds[0].dataloader.state_dict())


def defaults(config: type) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(config).parameters.items()}


COMMON = {
    "drop_last": True, "shuffle": True, "dynamic_batch_size": False, "pin_memory": True, "prefetch_factor": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "TextToImageDataloaderConfig",
            {"cache_dir": REQUIRED, "train_text_encoder": False, "base_resolution": (256, 256), "num_workers": 4}
            | COMMON,
        ),
        (
            "TextToVideoDataloaderConfig",
            {"cache_dir": REQUIRED, "model_type": "wan", "device": "cpu", "base_resolution": (512, 512)}
            | {"num_workers": 2, **COMMON},
        ),
        (
            "MetaFilesDataloaderConfig",
            {"meta_folder": REQUIRED, "shuffle": True, "num_workers": 2, "device": "cpu", "transform_text": None}
            | {"transform_video": None, "filter_fn": None, "max_files": None},
        ),
        (
            "MockWanDataloaderConfig",
            {"length": 1024, "num_channels": 16, "num_frame_latents": 16, "spatial_h": 30, "spatial_w": 52}
            | {"text_seq_len": 77, "text_embed_dim": 4096, "device": "cpu", "num_workers": 0, "shuffle": True},
        ),
        ("TextToImageDatasetConfig", {"cache_dir": REQUIRED, "train_text_encoder": False}),
        ("TextToVideoDatasetConfig", {"cache_dir": REQUIRED, "model_type": "wan", "device": "cpu"}),
        ("MetaFilesDatasetConfig", {"meta_folder": REQUIRED, "max_files": None, "device": "cpu"}),
        ("MockWanDatasetConfig", {"length": 1024, "device": "cpu"}),
    ],
)  # fmt: skip
def test_fields_and_defaults(name, expected):
    config = getattr(latentry, name)
    assert expected.items() <= defaults(config).items()
    needed = {key: "x" for key, default in expected.items() if default is REQUIRED}
    for unknown in ("batch_size", "dp_rank", "dp_world_size", "cachedir"):
        with pytest.raises(TypeError):
            config(**needed, **{unknown: 1})
    if "Dataloader" in name:
        build = inspect.signature(config.build).parameters
        assert list(build) == ["self", "dp_rank", "dp_world_size", "batch_size"]
        assert {p.kind for p in list(build.values())[1:]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("config", "builder"),
    [
        ("TextToImageDataloaderConfig", "build_text_to_image_multiresolution_dataloader"),
        ("TextToVideoDataloaderConfig", "build_video_multiresolution_dataloader"),
    ],
)
def test_a_configuration_has_every_parameter_of_its_builder(config, builder):
    given = {field.name for field in fields(getattr(latentry, config))} | {
        "batch_size",
        "dp_rank",
        "dp_world_size",
    }
    parameters = set(inspect.signature(getattr(latentry, builder)).parameters)
    assert parameters - given <= {"device"}
    assert given <= parameters


def test_a_configuration_builds_what_its_builder_builds(image_cache, tmp_path):
    clips = make_video_cache(tmp_path / "clips", {(128, 128, 9): 4})
    for config, build, options in (
        (
            latentry.TextToImageDataloaderConfig,
            latentry.build_text_to_image_multiresolution_dataloader,
            {"cache_dir": str(image_cache), "seed": 3, "num_workers": 0},
        ),
        (
            latentry.TextToVideoDataloaderConfig,
            latentry.build_video_multiresolution_dataloader,
            {"cache_dir": str(clips), "bucket_order": "interleaved", "num_workers": 0},
        ),
    ):
        built = config(**options).build(dp_rank=1, dp_world_size=2, batch_size=2)
        assert isinstance(built, latentry.DiffusionDataloaderBuild)
        loader, sampler = build(**options, dp_rank=1, dp_world_size=2, batch_size=2)
        assert built.dataloader.batch_sampler is built.sampler
        assert built.drop_last is True
        assert list(built.sampler) == list(sampler)
        assert built.sampler.state_dict() == sampler.state_dict()
        assert len(list(built.dataloader)) == len(loader)


def test_dataset_configurations(image_cache, tmp_path):
    clips = make_video_cache(tmp_path / "clips", {(128, 128, 9): 4})
    assert (
        latentry.TextToImageDatasetConfig(str(image_cache), train_text_encoder=True)
        .build()
        .train_text_encoder
    )
    dataset = latentry.TextToVideoDatasetConfig(str(clips), model_type="wan").build()
    assert (len(dataset), dataset.model_type) == (4, "wan")
    assert len(latentry.MockWanDatasetConfig(length=3).build()) == 3


@pytest.mark.parametrize("module", ["latentry", f"{NEMO}.collate_fns"])
def test_yaml_files_may_name_a_configuration(image_cache, module):
    node = {
        "_target_": f"{module}.TextToImageDataloaderConfig",
        "cache_dir": str(image_cache),
        "num_workers": 0,
    }
    loader, sampler = from_config({"dataloader": node}, batch_size=3, dp_rank=1, dp_world_size=2)
    assert (sampler.base_batch_size, sampler.rank, sampler.num_replicas) == (3, 1, 2)
    loader, _ = from_config(node)
    assert len(loader) == 29
    with pytest.raises(ConfigError, match="no parameter 'batchsize'; did you mean 'batch_size'"):
        from_config(node, batchsize=2)


@pytest.mark.parametrize(
    "target", ["latentry.MockWanDataloaderConfig", f"{NEMO}.build_mock_dataloader", f"{NEMO}.mock_dataloader.build_mock_dataloader"]
)  # fmt: skip
def test_yaml_files_may_name_mock_data(target):
    loader, sampler = from_config(
        {"_target_": target, "length": 6, "spatial_h": 4, "text_embed_dim": 8}, batch_size=2
    )
    (batch, *_) = loader
    assert batch["video_latents"].shape == (2, 16, 16, 4, 52)
    assert len(loader) == len(sampler) == 3
