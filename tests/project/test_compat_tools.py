"""The names of NeMo AutoModel's preprocessing tools: processors, caption loaders, functions."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from helpers import rows_of
from PIL import Image

from latentry import TextToImageDataset, TextToVideoDataset
from latentry.errors import ConfigError
from latentry.processors import processor_class
from latentry.testing import assert_same_cache, make_counter_clip
from tools.diffusion import processors as tools
from tools.diffusion.preprocessing_multiprocess import preprocess_dataset, preprocess_video_dataset

CPU = torch.device("cpu")


def test_every_name_is_exported_or_refused():
    for name in (
        "BaseModelProcessor", "BaseVideoProcessor", "ProcessorRegistry", "FluxProcessor", "WanProcessor",
        "Wan22Processor", "HunyuanVideoProcessor", "CaptionLoader", "CaptionLoadingStats",
        "JSONSidecarCaptionLoader", "MetaJSONCaptionLoader", "JSONLCaptionLoader", "get_caption_loader",
    ):  # fmt: skip
        assert name in tools.__all__
        assert getattr(tools, name).__name__ == name
    for name in ("Flux2Processor", "QwenImageProcessor", "QwenImageEditProcessor", "LTX2Processor"):
        with pytest.raises(
            ImportError, match=rf"{name} is not available: Latentry has no processor for .* yet"
        ):
            exec(f"from tools.diffusion.processors import {name}")
    with pytest.raises(AttributeError):
        _ = tools.Flux3Processor


# ---- processors -----------------------------------------------------------------------------


def test_registry():
    registry = tools.ProcessorRegistry
    assert {"flux", "wan", "wan2.2", "hunyuan"} <= set(registry.list_available())
    assert isinstance(registry.get("wan2.1"), tools.WanProcessor)
    assert isinstance(registry.get("hunyuanvideo-1.5"), tools.HunyuanVideoProcessor)
    assert isinstance(registry.get("hunyuan"), tools.BaseVideoProcessor)
    with pytest.raises(ConfigError, match="unknown processor 'sdxl'; choose one of flux, hunyuan"):
        registry.get("sdxl")


def test_registering_a_processor(monkeypatch):
    registry = tools.ProcessorRegistry
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))

    @registry.register("mine")
    class Mine(tools.FluxProcessor):
        pass

    assert type(registry.get("mine")) is Mine
    assert "mine" in registry.list_available()
    with pytest.raises(TypeError, match="abstract"):
        tools.BaseModelProcessor()


def test_flux(flux_folder, tmp_path):
    adapter = tools.ProcessorRegistry.get("flux")
    assert (adapter.model_type, adapter.default_model_name) == ("flux", "black-forest-labs/FLUX.1-dev")
    models = adapter.load_models(str(flux_folder), "cpu")
    ours = processor_class("flux")(str(flux_folder), CPU, torch.float32)
    pixels = torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    latent = adapter.encode_image(pixels, models, "cpu")
    assert torch.equal(latent, ours.encode_pixels(pixels[None], None)[0])
    scaled = pixels[None].float() / 127.5 - 1
    assert torch.equal(adapter.encode_image(scaled, models, "cpu"), latent)
    text = adapter.encode_text("a red car", models, "cpu")
    expected = ours.encode_texts(["a red car"])
    assert list(text) == list(expected)
    assert all(torch.equal(text[key], expected[key]) for key in text)
    assert adapter.verify_latent(latent, models, "cpu")
    assert not adapter.verify_latent(torch.zeros_like(latent), models, "cpu")
    assert not adapter.verify_latent(latent * float("nan"), models, "cpu")
    with pytest.raises(ConfigError, match=r"pixels are torch\.int64"):
        adapter.encode_image(pixels.long(), models, "cpu")
    with pytest.raises(ConfigError, match="not what load_models returned"):
        adapter.encode_image(pixels, {}, "cpu")

    data = adapter.get_cache_data(
        latent,
        text,
        {
            "original_resolution": (192, 128),
            "bucket_resolution": (96, 64),
            "crop_offset": (0, 2),
            "prompt": "a red car",
            "image_path": "/photos/car.jpg",
            "bucket_id": 3,
        },
    )
    write_cache(tmp_path, data, "image_path")
    item = TextToImageDataset(tmp_path)[0]
    assert torch.equal(item["latent"], latent)
    assert (item["prompt"], item["crop_offset"].tolist()) == ("a red car", [0, 2])
    assert (data["aspect_ratio"], data["model_type"]) == (1.5, "flux")


def write_cache(folder: Path, data: dict, path_key: str) -> None:
    width, height = data["bucket_resolution"]
    (folder / f"{width}x{height}").mkdir()
    torch.save(data, folder / f"{width}x{height}" / "a.pt")
    row = {key: data[key] for key in (path_key, "bucket_resolution", "prompt", "model_type")}
    row |= {"cache_file": "a.pt", "num_frames": data.get("num_frames")}
    (folder / "metadata_shard_0000.json").write_text(json.dumps([row]))
    (folder / "metadata.json").write_text(json.dumps({"shards": ["metadata_shard_0000.json"]}))


@pytest.mark.parametrize("name", ["wan", "wan2.2", "hunyuan"])
def test_videos(name, wan_folder, hunyuan_folder, tmp_path):
    folder = str(hunyuan_folder if name == "hunyuan" else wan_folder)
    adapter = tools.ProcessorRegistry.get(name)
    assert (adapter.frame_constraint, adapter.quantization) == ("4n+1", 16)
    models = adapter.load_models(folder, "cpu")
    ours = processor_class(name)(folder, CPU, torch.float32)
    clip = torch.randint(
        0, 256, (1, 3, 5, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    latents = adapter.encode_video(clip, models, "cpu")
    assert latents.ndim == 5
    assert torch.equal(latents, ours.encode_pixels(clip, None))
    drawn = adapter.encode_video(clip, models, "cpu", deterministic=False)
    assert drawn.shape == latents.shape
    assert not torch.equal(drawn, latents)
    frame = adapter.encode_image(clip[0, :, 0], models, "cpu")
    assert frame.shape[:3] == (1, latents.shape[1], 1)
    text = adapter.encode_text("a walk", models, "cpu")
    first_frame = clip[0, :, 0].permute(1, 2, 0)
    embeds = adapter.encode_first_frame(first_frame, models, "cpu")
    assert (embeds is not None) == (name == "hunyuan")
    assert adapter.verify_latent(latents, models, "cpu")
    metadata = {
        "original_resolution": (64, 64),
        "bucket_resolution": (64, 64),
        "prompt": "a walk",
        "video_path": "/clips/walk.mp4",
        "num_frames": 5,
        "first_frame": first_frame,
        "image_embeds": embeds,
    }
    data = adapter.get_cache_data(latents, text, metadata)
    assert data["model_type"] == {"wan": "wan", "wan2.2": "wan22", "hunyuan": "hunyuan"}[name]
    write_cache(tmp_path, data, "video_path")
    item = TextToVideoDataset(tmp_path, model_type=data["model_type"])[0]
    assert torch.equal(item["video_latents"], latents)
    assert ("image_embeds" in item) == (name == "hunyuan")

    one = adapter.get_cache_data(
        frame,
        text,
        {**metadata, "mode": "frames", "num_frames": 1, "frame_index": 2, "total_frames_extracted": 4, "source_frame_index": 9},
    )  # fmt: skip
    assert (one["frame_index"], one["total_frames_extracted"], one["source_frame_index"]) == (2, 4, 9)
    assert one["first_frame"] is None


# ---- captions -------------------------------------------------------------------------------


@pytest.fixture
def captioned(tmp_path) -> Path:
    folder = tmp_path / "captioned"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.mp4").write_bytes(b"")
    (folder / "a.json").write_text(json.dumps({"caption": "from a sidecar", "usr": "by a user"}))
    (folder / "meta.json").write_text(json.dumps([{"file_name": "b.mp4", "caption": "from meta.json"}]))
    (folder / "list.jsonl").write_text(json.dumps({"file_name": "c.mp4", "internvl": "from a list"}))
    return folder


@pytest.mark.parametrize(
    ("caption_format", "kind", "field", "expected"),
    [
        ("sidecar", "JSONSidecarCaptionLoader", "caption", {"a.mp4": "from a sidecar"}),
        ("sidecar", "JSONSidecarCaptionLoader", "usr", {"a.mp4": "by a user"}),
        ("meta_json", "MetaJSONCaptionLoader", "caption", {"b.mp4": "from meta.json"}),
        ("jsonl", "JSONLCaptionLoader", "internvl", {"c.mp4": "from a list"}),
    ],
)
def test_caption_loaders(captioned, caption_format, kind, field, expected):
    loader = tools.get_caption_loader(caption_format)
    assert type(loader) is getattr(tools, kind)
    assert isinstance(loader, tools.CaptionLoader)
    assert loader.load_captions(sorted(captioned.glob("*.mp4")), field) == expected
    assert isinstance(loader.stats, tools.CaptionLoadingStats)
    assert (loader.stats.total_files, loader.stats.captions_found, loader.stats.captions_missing) == (3, 1, 2)


def test_caption_loader_mistakes(captioned):
    with pytest.raises(
        ConfigError, match="unknown caption_format 'xml'; choose one of sidecar, meta_json, jsonl"
    ):
        tools.get_caption_loader("xml")
    (captioned / "sub").mkdir()
    with pytest.raises(ConfigError, match="have the same name"):
        tools.get_caption_loader("sidecar").load_captions([captioned / "a.mp4", captioned / "sub" / "a.mp4"])
    (captioned / "b.json").write_text("{")
    loader = tools.get_caption_loader("sidecar")
    loader.load_captions([captioned / "b.mp4"])
    assert "not valid JSON" in loader.stats.problems[str(captioned / "b.json")]


# ---- functions ------------------------------------------------------------------------------


def run_tool(*arguments: object) -> None:
    module = importlib.import_module("tools.diffusion.preprocessing_multiprocess")
    assert module.main([*map(str, arguments), "--quiet"]) == 0


def test_preprocess_dataset(tmp_path, flux_folder):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        Image.effect_noise((90, 60), 80).convert("RGB").save(photos / f"{number}.png")
    result = preprocess_dataset(
        photos,
        tmp_path / "cache",
        "flux",
        model_name=str(flux_folder),
        max_pixels=64 * 64,
        shard_size=2,
        max_images=2,
    )
    assert (result.num_encoded, result.failures) == (2, ())
    assert len(json.loads((tmp_path / "cache" / "metadata_shard_0000.json").read_text())) == 2
    run_tool("image", "--image_dir", photos, "--output_dir", tmp_path / "command", "--processor", "flux",
             "--model_name", flux_folder, "--max_pixels", 4096, "--shard_size", 2, "--max_images", 2)  # fmt: skip
    assert_same_cache(tmp_path / "cache", tmp_path / "command")
    with pytest.raises(ConfigError, match="resolution_preset and max_pixels are alternatives"):
        preprocess_dataset(photos, tmp_path / "x", "flux", resolution_preset="512p", max_pixels=4096)
    with pytest.raises(ConfigError, match="unknown resolution_preset '480p'; choose one of 256p"):
        preprocess_dataset(photos, tmp_path / "x", "flux", resolution_preset="480p")


def test_preprocess_video_dataset(tmp_path, wan_folder):
    clips = tmp_path / "clips"
    clips.mkdir()
    make_counter_clip(clips / "a.mp4", 9, size=(160, 96))
    (clips / "a.json").write_text(json.dumps({"text": "counting"}))
    result = preprocess_video_dataset(
        clips, tmp_path / "cache", "wan2.1", model_name=str(wan_folder), target_frames=5, height=64, width=96,
        center_crop=False, caption_format="sidecar", caption_field="text", resize_mode="area",
    )  # fmt: skip
    assert result.num_encoded == 1
    (row,) = rows_of(tmp_path / "cache")
    assert (row["bucket_resolution"], row["num_frames"], row["prompt"]) == ([96, 64], 5, "counting")
    assert row["cache_file"].endswith(".meta")
    run_tool("video", "--video_dir", clips, "--output_dir", tmp_path / "command", "--processor", "wan", "--model_name",
             wan_folder, "--target_frames", 5, "--height", 64, "--width", 96, "--no_center_crop", "--caption_format",
             "sidecar", "--caption_field", "text", "--resize_mode", "area")  # fmt: skip
    assert_same_cache(tmp_path / "cache", tmp_path / "command")
    with pytest.raises(ConfigError, match="height and width go together"):
        preprocess_video_dataset(clips, tmp_path / "x", "wan", height=64)
    with pytest.raises(ConfigError, match="height and width fix the size"):
        preprocess_video_dataset(clips, tmp_path / "x", "wan", height=64, width=64, resolution_preset="512p")
