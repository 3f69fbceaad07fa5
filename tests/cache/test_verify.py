from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import EXAMPLES

from latentry import Recipe, VideoOptions, prepare, verify_cache
from latentry.cli import main
from latentry.errors import CacheNotFoundError, ConfigError
from latentry.testing import make_counter_clip, make_video_cache


@pytest.fixture
def cache(tmp_path) -> Path:
    prepare(
        Recipe(max_pixels=128 * 128, crop_mode="random"),
        image_dir=EXAMPLES,
        output_dir=tmp_path / "cache",
        max_files=4,
    )
    return tmp_path / "cache"


def a_file(cache: Path) -> Path:
    return sorted(cache.glob("*x*/*.pt"))[0]


def rewrite(path: Path, **changes) -> None:
    torch.save({**torch.load(path, weights_only=True), **changes}, path)


def latent_of(path: Path) -> torch.Tensor:
    return torch.load(path, weights_only=True)["latent"]


def test_good_caches_of_any_kind_have_no_problems(cache, nemo_image_cache, nemo_video_cache, tmp_path):
    for folder, count in ((cache, 4), (nemo_image_cache, 6), (nemo_video_cache, 3)):
        result = verify_cache(folder)
        assert (result.num_samples, result.problems, result.exit_status) == (count, (), 0)
    mixed = make_video_cache(tmp_path / "clips", {(128, 64, 9): 2, (128, 64, 17): 1})
    assert verify_cache(mixed).exit_status == 0


def test_decoding_compares_with_the_source(cache):
    result = verify_cache(cache, decode=True)
    assert result.exit_status == 0
    assert len(result.psnr_db) == 4
    assert min(result.psnr_db.values()) > 22, "the very window that was cropped at random"


def test_clips_are_decoded_too(tmp_path):
    (tmp_path / "clips").mkdir()
    make_counter_clip(tmp_path / "clips" / "a.mp4", 30, size=(128, 128))
    for mode, options in (("video", {"target_frames": 9}), ("frames", {"num_frames": 4})):
        recipe = Recipe(max_pixels=128 * 128, video=VideoOptions(mode=mode, **options))
        prepare(recipe, video_dir=tmp_path / "clips", output_dir=tmp_path / mode)
        result = verify_cache(tmp_path / mode, decode=True)
        assert result.problems == ()
        assert min(result.psnr_db.values()) > 20


@pytest.mark.parametrize(
    ("breakage", "says"),
    [
        (lambda f: f.unlink(), "missing"),
        (lambda f: f.write_bytes(f.read_bytes()[:-50]), "truncated or damaged"),
        (lambda f: f.write_bytes(f.read_bytes()[:-1] + b"x"), "checksum"),
        (lambda f: rewrite(f, latent=latent_of(f) * float("nan")), "has a latent with NaN"),
        (lambda f: rewrite(f, latent=latent_of(f) * 0 + 3), r"has a constant latent \(3 everywhere\)"),
        (lambda f: rewrite(f, bucket_id=77), "bucket_id is 77, but its row says"),
        (lambda f: rewrite(f, model_type="flux"), "model_type is 'flux', but its row says 'tiny'"),
        (lambda f: rewrite(f, latent=torch.zeros(16, 3, 3)), "scaled-down"),
        (
            lambda f: rewrite(f, prompt_embeds=torch.full((1, 64, 64), float("inf"))),
            "prompt_embeds contains NaN",
        ),
        (lambda f: rewrite(f, prompt="another"), "prompt is 'another', but its row says"),
        (lambda f: (f.parent / "stray.pt").write_bytes(b"x"), "is in no row"),
    ],
)
def test_what_is_wrong_is_named(cache, breakage, says):
    victim = a_file(cache)
    breakage(victim)
    result = verify_cache(cache)
    assert result.exit_status == 2
    import re

    assert any(re.search(says, problem.what) for problem in result.problems), result.problems
    assert all(problem.file.startswith(victim.parent.name) for problem in result.problems)


def test_files_that_differ_from_their_kind_are_named(tmp_path):
    (tmp_path / "clips").mkdir()
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        make_counter_clip(tmp_path / "clips" / name, 30, size=(128, 128))
    recipe = Recipe(max_pixels=128 * 128, video=VideoOptions(target_frames=9))
    prepare(recipe, video_dir=tmp_path / "clips", output_dir=tmp_path / "cache")
    victim = sorted((tmp_path / "cache").glob("*x*/*.pt"))[-1]
    data = torch.load(victim, weights_only=True)
    changed = {
        **data,
        "video_latents": data["video_latents"][:, :, :5].double(),
        "text_embeddings": data["text_embeddings"][..., :3],
    }
    torch.save({k: v for k, v in changed.items() if k != "first_frame"}, victim)
    said = " ".join(problem.what for problem in verify_cache(tmp_path / "cache").problems)
    for part in (
        "have 5 frames; 9 frames make 9",
        "torch.float64",
        "text_embeddings is",
        "no first_frame",
        "checksum",
    ):
        assert part in said
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        make_counter_clip(tmp_path / "clips" / name, 40, size=(128, 128))
    decoded = verify_cache(tmp_path / "cache", decode=True)
    assert any("has changed since" in problem.what for problem in decoded.problems)


def test_the_command(cache, capsys, nemo_image_cache):
    assert main(["verify", str(cache), "--decode"]) == 0
    assert "4 samples, 0 problems" in capsys.readouterr().out
    a_file(cache).unlink()
    assert main(["verify", str(cache), "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 1
    assert main(["verify", str(cache / "nothing")]) == 1
    assert "no folder" in capsys.readouterr().err
    assert main(["verify", str(nemo_image_cache), "--decode"]) == 1
    assert "leave out --decode" in capsys.readouterr().err


def test_what_cannot_be_verified(tmp_path, nemo_image_cache):
    with pytest.raises(CacheNotFoundError):
        verify_cache(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="records no recipe"):
        verify_cache(nemo_image_cache, decode=True)
