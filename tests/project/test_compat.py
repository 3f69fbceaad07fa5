"""The names NeMo AutoModel documents, with their documented signatures."""

from __future__ import annotations

import importlib
import inspect
import logging

import pytest
from torch.utils.data import Dataset, Sampler

import latentry

ROOT = "nemo_automodel.components.datasets.diffusion"


EXPORTED = [
    "BaseMultiresolutionDataset", "MetaFilesDataset", "MultiTierBucketCalculator", "SequentialBucketSampler",
    "TextToImageDataset", "TextToVideoDataset", "VIDEO_OPTIONAL_FIELDS", "build_dataloader", "build_mock_dataloader",
    "build_text_to_image_multiresolution_dataloader", "build_video_multiresolution_dataloader",
    "collate_fn_production", "collate_fn_text_to_image", "collate_fn_video",
]  # fmt: skip


def test_the_package_exports_every_name():
    package = importlib.import_module(ROOT)
    assert sorted(package.__all__) == sorted(EXPORTED)
    for name in EXPORTED:
        assert getattr(package, name) is not None


def test_exported_builders_work(nemo_image_cache, nemo_video_cache):
    package = importlib.import_module(ROOT)
    images = package.TextToImageDataset(nemo_image_cache)
    assert package.collate_fn_text_to_image([images[0]])["image_latents"].shape[0] == 1
    assert package.collate_fn_production([images[0]])["latent"].shape[0] == 1
    videos = package.TextToVideoDataset(nemo_video_cache)
    assert package.collate_fn_video([videos[0]])["video_latents"].shape[0] == 1
    (folder, *_) = (path for path in nemo_video_cache.iterdir() if path.is_dir())
    loader, _ = package.build_dataloader(meta_folder=str(folder), batch_size=1, dp_rank=0, dp_world_size=1)
    (batch,) = loader
    assert batch["metadata"][0]["prompt"].startswith("clip number")
    loader, _ = package.build_mock_dataloader(length=2, spatial_h=2, spatial_w=2, text_embed_dim=4)
    assert len(list(loader)) == 2


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (f"{ROOT}.loader", "DiffusionDataloaderBuild"),
        (f"{ROOT}.collate_fns", "TextToImageDataloaderConfig"),
        (f"{ROOT}.collate_fns", "TextToVideoDataloaderConfig"),
        (f"{ROOT}.text_to_image_dataset", "TextToImageDatasetConfig"),
        (f"{ROOT}.text_to_video_dataset", "TextToVideoDatasetConfig"),
        (f"{ROOT}.meta_files_dataset", "MetaFilesDataset"),
        (f"{ROOT}.meta_files_dataset", "MetaFilesDatasetConfig"),
        (f"{ROOT}.meta_files_dataset", "MetaFilesDataloaderConfig"),
        (f"{ROOT}.mock_dataloader", "MockWanDatasetConfig"),
        (f"{ROOT}.mock_dataloader", "MockWanDataloaderConfig"),
        (f"{ROOT}.multi_tier_bucketing", "MultiTierBucketCalculator"),
        (f"{ROOT}.sampler", "SequentialBucketSampler"),
        (f"{ROOT}.base_dataset", "BaseMultiresolutionDataset"),
        (f"{ROOT}.text_to_image_dataset", "TextToImageDataset"),
        (f"{ROOT}.text_to_video_dataset", "TextToVideoDataset"),
        (f"{ROOT}.collate_fns", "build_text_to_image_multiresolution_dataloader"),
        (f"{ROOT}.collate_fns", "build_video_multiresolution_dataloader"),
        (ROOT, "build_text_to_image_multiresolution_dataloader"),
        (ROOT, "build_video_multiresolution_dataloader"),
    ],
)
def test_documented_names_are_ours(module, name):
    assert getattr(importlib.import_module(module), name) is getattr(latentry, name)


def test_collate_functions_have_their_names():
    module = importlib.import_module(f"{ROOT}.collate_fns")
    assert {"collate_fn_production", "collate_fn_text_to_image", "collate_fn_video"} <= set(vars(module))


def parameters(function):
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and name != "self"
    }


REQUIRED = inspect.Parameter.empty


def test_signatures():
    calculator, sampler = latentry.MultiTierBucketCalculator, latentry.SequentialBucketSampler
    assert parameters(calculator) == {"quantization": 64, "max_pixels": None, "debug_mode": False}
    assert parameters(calculator.from_preset) == {"preset": REQUIRED, "quantization": 64}
    assert parameters(calculator.get_dynamic_batch_size) == {
        "resolution": REQUIRED,
        "base_batch_size": 32,
        "base_resolution": (512, 512),
    }
    assert parameters(calculator.resize_and_crop) == {
        "image": REQUIRED,
        "target_width": REQUIRED,
        "target_height": REQUIRED,
        "crop_mode": "center",
    }
    assert parameters(sampler) == {
        "dataset": REQUIRED,
        "base_batch_size": 32,
        "base_resolution": (512, 512),
        "drop_last": True,
        "shuffle_buckets": True,
        "shuffle_within_bucket": True,
        "dynamic_batch_size": False,
        "seed": 42,
        "num_replicas": None,
        "rank": None,
    }
    assert issubclass(sampler, Sampler)
    assert issubclass(latentry.BaseMultiresolutionDataset, Dataset)
    for name in ("_build_lookup_structures", "_calculate_max_resolution", "_generate_all_buckets",
                 "_print_bucket_summary", "_round_to_quantization", "get_all_buckets", "get_bucket_by_id",
                 "get_bucket_by_resolution", "get_bucket_for_image"):  # fmt: skip
        assert callable(getattr(calculator, name))
    for name in ("_calculate_total_batches", "_get_batch_size", "get_batch_info", "load_state_dict",
                 "set_epoch", "state_dict"):  # fmt: skip
        assert callable(getattr(sampler, name))


def test_modules_have_their_loggers_and_debug_mode_uses_them(caplog):
    module = importlib.import_module(f"{ROOT}.multi_tier_bucketing")
    assert isinstance(module.logger, logging.Logger)
    assert isinstance(importlib.import_module(f"{ROOT}.sampler").logger, logging.Logger)
    with caplog.at_level(logging.INFO):
        module.MultiTierBucketCalculator(debug_mode=True)
    assert "256x256" in caplog.text
