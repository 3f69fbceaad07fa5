"""Other names of processors, and Wan 2.2, which shares the code of Wan 2.1."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers import edit_json, rows_of, run_main

from latentry import Recipe, VideoOptions, prepare, verify_cache
from latentry.errors import ConfigError, ModelError
from latentry.processors import ALIASES, PROCESSORS, Processor, canonical_name, processor_class
from latentry.serve.dataset import TextToVideoDataset
from latentry.testing import make_counter_clip


def test_aliases_name_processors():
    assert {
        "wan2.1": "wan",
        "hunyuanvideo": "hunyuan",
        "hunyuanvideo-1.5": "hunyuan",
    }.items() <= ALIASES.items()
    for alias, name in ALIASES.items():
        assert alias not in PROCESSORS
        assert canonical_name(alias) == name
        assert processor_class(alias) is processor_class(name)
        assert Recipe(processor=alias) == Recipe(processor=name)
    assert canonical_name("flux") == "flux"
    with pytest.raises(ConfigError, match="unknown processor 'wan3'; choose one of tiny, flux"):
        processor_class("wan3")


def test_the_command_lists_aliases(capsys):
    status, output, _ = run_main(capsys, "processors")
    assert status == 0
    (hunyuan,) = (line for line in output.splitlines() if line.startswith("hunyuan"))
    assert "hunyuanvideo, hunyuanvideo-1.5" in hunyuan
    (wan,) = (line for line in output.splitlines() if line.startswith("wan "))
    assert "wan2.1" in wan


def test_a_cache_records_the_name_and_is_added_to_under_both(tmp_path, wan_folder, capsys):
    clips, cache = tmp_path / "clips", tmp_path / "cache"
    clips.mkdir()
    make_counter_clip(clips / "a.mp4", 5, size=(64, 64))
    common = [
        "--video_dir",
        clips,
        "--output_dir",
        cache,
        "--model_name",
        wan_folder,
        "--max_pixels",
        4096,
        "--quiet",
    ]
    assert run_main(capsys, "video", "--processor", "wan2.1", *common)[0] == 0
    written = json.loads((cache / "metadata.json").read_text())
    assert (written["processor"], written["recipe"]["processor"]) == ("wan", "wan")
    make_counter_clip(clips / "b.mp4", 5, size=(64, 64))
    status, output, error = run_main(capsys, "video", "--processor", "wan", *common[:-1], "--json")
    assert status == 0, error
    assert (json.loads(output)["encoded"], json.loads(output)["already_done"]) == (1, 1)
    edit_json(cache / "metadata.json", lambda metadata: metadata.update(processor="wan2.1"))
    assert verify_cache(cache).problems == ()


def test_wan_2_2(tmp_path, wan_folder):
    clips = tmp_path / "clips"
    clips.mkdir()
    make_counter_clip(clips / "a.mp4", 9, size=(64, 64))
    recipes = {
        name: Recipe(
            processor=name,
            model_name=str(wan_folder),
            max_pixels=64 * 64,
            output_format="meta",
            video=VideoOptions(target_frames=5),
        )
        for name in ("wan", "wan2.2")
    }
    for name, recipe in recipes.items():
        prepare(recipe, video_dir=clips, output_dir=tmp_path / name)
    old, new = (torch.load(rows_of(tmp_path / name)[0]["cache_file"], weights_only=True) for name in recipes)
    assert torch.equal(old["video_latents"], new["video_latents"])
    assert torch.equal(old["text_embeddings"], new["text_embeddings"])
    assert new["text_embeddings"].shape[:2] == (1, 226)
    assert (new["model_type"], new["model_version"]) == ("wan22", "wan2.2")
    assert json.loads((tmp_path / "wan2.2" / "metadata.json").read_text())["model_type"] == "wan22"
    assert processor_class("wan2.2").info.default_model_name == "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    assert len(TextToVideoDataset(tmp_path / "wan2.2", model_type="wan22")) == 1


def test_a_vae_with_another_scale_is_refused(tmp_path, wan_folder):
    folder = shutil.copytree(wan_folder, tmp_path / "wan_5b")
    edit_json(folder / "vae" / "config.json", lambda config: config.update(scale_factor_spatial=16))
    with pytest.raises(
        ModelError, match=r"16 pixels per latent position, but the processor wan2\.2 is for .* 8"
    ):
        processor_class("wan2.2")(str(folder), torch.device("cpu"), torch.float32)


class WrittenForAnEarlierRelease:
    def __init__(self, model_name, device, dtype): ...

    encode_pixels = encode_texts = media_fields = decode_latents = weights_identity = None


class WithoutMethods(Processor):
    def __init__(self, model_name, device, dtype, **options): ...


def test_a_processor_of_an_earlier_release_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(PROCESSORS, "old", f"{__name__}:WrittenForAnEarlierRelease")
    with pytest.raises(ConfigError) as error:
        processor_class("old")
    assert str(error.value) == (
        "the processor WrittenForAnEarlierRelease lacks the methods max_batch_size, takes_turns, text_pass, "
        "use_less_memory and the constructor's arguments text_dtype, device_memory; let it inherit from "
        "latentry.processors.Processor, and see docs/how-to/add-a-processor.md"
    )
    monkeypatch.setitem(PROCESSORS, "new", f"{__name__}:WithoutMethods")
    assert processor_class("new") is WithoutMethods, "the methods of Processor are inherited"
