"""Sizes: what becomes of an input, which limits leave it out, and finer buckets."""

from __future__ import annotations

import json

import pytest
from helpers import SMALL, rows_of, run_main
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from latentry import Recipe, prepare
from latentry.crops import covering_size
from latentry.encode.planning.sizes import SizeRules, SizeSummary, size_change
from latentry.errors import RunError
from latentry.testing import make_counter_clip
from latentry.types import Bucket, SizeChange

SIDES = st.integers(1, 5000)


def gradient(path, width, height):
    """A picture whose latent is not constant."""
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(path)


@pytest.fixture
def pictures(tmp_path):
    """Two good pictures, one small, one thin and one wide."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    sizes = {"good": (256, 256), "fine": (300, 300), "small": (40, 40), "thin": (161, 1), "wide": (1600, 200)}
    for name, size in sizes.items():
        gradient(folder / f"{name}.png", *size)
    return folder


@given(size=st.tuples(SIDES, SIDES), bucket=st.tuples(SIDES, SIDES))
def test_changes_are_those_of_scaling_and_cropping(size, bucket):
    change = size_change(size, bucket)
    width, height = covering_size(size, bucket)
    assert change.upscale == pytest.approx(max(1, bucket[0] / size[0], bucket[1] / size[1]))
    assert 0 <= change.crop < 1
    # The scaled size is rounded to whole pixels, which moves the share by less than a pixel's row or column.
    assert abs(change.crop - (1 - bucket[0] * bucket[1] / (width * height))) < 1 / min(width, height)
    stretched = size_change(size, bucket, "none")
    assert (stretched.crop, change.stretch) == (0, 1)
    assert stretched.stretch == pytest.approx(1 / (1 - change.crop))


def test_equal_aspect_ratios_crop_exactly_nothing():
    assert size_change((4000, 3000), (640, 480)) == SizeChange(1, 0, 1)
    assert size_change((3, 7), (999, 2331), "none") == SizeChange(333, 0, 1)


def test_each_limit_leaves_out_and_names_its_rule():
    square = Bucket(256, 256)
    for rules, size, reason in [
        (SizeRules(min_pixels=100), (9, 11), "has fewer than 100 pixels (min_pixels)"),
        (SizeRules(min_side=50), (49, 500), "has a side shorter than 50 pixels (min_side)"),
        (SizeRules(max_upscale=2), (127, 127), "would be scaled up by more than 2x (max_upscale)"),
        (SizeRules(max_crop=0.2), (300, 200), "would lose more than 20% of its area to cropping (max_crop)"),
    ]:
        assert rules.broken_by(size, square) == reason
    assert SizeRules(min_pixels=100).broken_by((10, 10), square) is None
    assert SizeRules(min_side=50).broken_by((50, 50), square) is None
    assert SizeRules(max_upscale=2).broken_by((128, 128), square) is None
    assert SizeRules(max_crop=0.5).broken_by((512, 256), square) is None


def test_summary_has_means_and_the_worst_example():
    summary = SizeSummary(SizeRules())
    summary.add("a", (128, 128), Bucket(256, 256))
    summary.add("b", (512, 256), Bucket(256, 256))
    summary.add("c", (64, 64), Bucket(256, 256))
    for _ in range(3):  # several samples of one input
        summary.add("d", (32, 32), Bucket(64, 64))
    assert summary.means()[Bucket(256, 256)] == SizeChange((2 + 1 + 4) / 3, 0.5 / 3, 1)
    assert summary.warnings() == ("1 input is scaled up by more than 2x: c by 4x, from 64x64 to 256x256",)
    summary.add("e", (8, 64), Bucket(64, 64))
    assert summary.warnings() == (
        "2 inputs are scaled up by more than 2x: for example e by 8x, from 8x64 to 64x64",
        "1 input is cropped by more than 50%: e by 88%, from 8x64 to 64x64",
    )


def test_thin_picture_does_not_go_unnoticed(pictures, tmp_path):
    recipe = Recipe(max_pixels=1536 * 1536)
    result = prepare(recipe, image_dir=pictures, output_dir=tmp_path / "cache", dry_run=True)
    assert Bucket(2304, 1024) in result.buckets
    upscaled, cropped = result.warnings
    assert upscaled == (
        "5 inputs are scaled up by more than 2x: for example thin.png by 1024x, from 161x1 to 2304x1024"
    )
    assert (
        cropped
        == "2 inputs are cropped by more than 50%: for example thin.png by 99%, from 161x1 to 2304x1024"
    )
    assert "warning: 5 inputs are scaled up" in str(result).replace("\n", " ")
    assert "mean upscaling" in str(result)
    assert "mean cropped" in str(result)
    assert result.to_dict()["warnings"] == list(result.warnings)


def test_limits_leave_out_inputs_and_say_how_many(pictures, tmp_path):
    recipe = Recipe(max_pixels=128 * 128, min_pixels=200, min_side=50, max_crop=0.6)
    result = prepare(recipe, image_dir=pictures, output_dir=tmp_path / "cache")
    assert (result.num_encoded, result.failures, result.exit_status) == (2, (), 0)
    assert {failure.name: failure.reason for failure in result.left_out} == {
        "small.png": "has a side shorter than 50 pixels (min_side)",
        "thin.png": "has fewer than 200 pixels (min_pixels)",
        "wide.png": "would lose more than 60% of its area to cropping (max_crop)",
    }
    assert "3 left out" in str(result)
    assert "left out by your rules" in str(result)
    assert len(rows_of(tmp_path / "cache")) == 2
    assert not (tmp_path / "cache" / "failures.jsonl").exists()


def test_limits_apply_to_samples_that_are_already_there(pictures, tmp_path):
    cache = tmp_path / "cache"
    first = prepare(SMALL, image_dir=pictures, output_dir=cache)
    assert first.num_encoded == 5
    stricter = Recipe(max_pixels=128 * 128, max_upscale=2)
    result = prepare(stricter, image_dir=pictures, output_dir=cache)
    assert (result.num_encoded, result.num_already_done) == (0, 3)
    assert [failure.name for failure in result.left_out] == ["small.png", "thin.png"]
    assert {row["source_name"] for row in rows_of(cache)} == {"fine.png", "good.png", "wide.png"}
    fresh = prepare(stricter, image_dir=pictures, output_dir=tmp_path / "fresh")
    assert fresh.left_out == result.left_out
    assert fresh.size_changes == result.size_changes, "known from the rows, without reading headers"
    assert prepare(SMALL, image_dir=pictures, output_dir=cache).num_encoded == 2, "and back"


def test_limits_that_leave_nothing_are_an_error(pictures, tmp_path):
    prepare(SMALL, image_dir=pictures, output_dir=tmp_path / "cache")
    with pytest.raises(
        RunError, match=r"every input is left out, such as fine.png, which has fewer than 9000000 pix"
    ):
        prepare(
            Recipe(max_pixels=128 * 128, min_pixels=9_000_000),
            image_dir=pictures, output_dir=tmp_path / "cache",
        )  # fmt: skip
    assert len(rows_of(tmp_path / "cache")) == 5, "the cache is as it was"


def test_limits_of_clips_and_frames(tmp_path):
    from latentry import VideoOptions

    (tmp_path / "clips").mkdir()
    make_counter_clip(tmp_path / "clips" / "large.mp4", 12, size=(128, 128))
    make_counter_clip(tmp_path / "clips" / "small.mp4", 12, size=(32, 32))
    for mode in ("video", "frames"):
        recipe = Recipe(max_pixels=128 * 128, video=VideoOptions(mode=mode, num_frames=3), min_side=64)
        result = prepare(recipe, video_dir=tmp_path / "clips", output_dir=tmp_path / mode)
        assert [failure.name for failure in result.left_out] == ["small.mp4"], "once, whatever its samples"
        assert result.num_encoded == (1 if mode == "video" else 3)
    recipe = Recipe(max_pixels=128 * 128, video=VideoOptions(), crop_mode="none")
    gradient_clip = make_counter_clip(tmp_path / "clips" / "wide.mp4", 12, size=(512, 64))
    result = prepare(recipe, video_dir=gradient_clip.parent, output_dir=tmp_path / "x", dry_run=True)
    assert all(change.crop == 0 for change in result.size_changes.values())
    assert "1 input is stretched out of shape by more than 1.5x: wide.mp4 by" in " ".join(result.warnings)
    assert "mean stretch" in str(result)


def test_command_reports_left_out_inputs(pictures, tmp_path, capsys):
    flags = ["--resolution_preset", "256p", "--max_upscale", "1", "--max_crop", "0.25", "--dry_run", "--json"]
    status, out, _ = run_main(
        capsys, "image", "--image_dir", pictures, "--output_dir", tmp_path / "cache", *flags
    )
    assert status == 0
    plan = json.loads(out)
    assert [entry["name"] for entry in plan["left_out"]] == ["small.png", "thin.png", "wide.png"]
    reasons = {entry["reason"].rpartition(" ")[2] for entry in plan["left_out"]}
    assert reasons == {"(--max_upscale)", "(--max_crop)"}, "flags, as in errors"
    assert plan["encoded"] == 2
    assert plan["size_changes"] == {"256x256": {"upscale": 1.0, "crop": 0.0, "stretch": 1.0}}


# ---- buckets on request ---------------------------------------------------------------------


def test_finer_buckets_and_chosen_shapes(pictures, tmp_path, capsys):
    flags = ["--max_pixels", 128 * 128, "--bucket_step", "8", "--aspect_ratios", "1:1,8:1"]
    command = ["image", "--image_dir", pictures, "--output_dir", tmp_path / "cache", "--quiet", *flags]
    assert run_main(capsys, *command)[0] == 0
    resolutions = {row["source_name"]: tuple(row["bucket_resolution"]) for row in rows_of(tmp_path / "cache")}
    assert resolutions["good.png"] == (128, 128)
    assert resolutions["wide.png"] == (336, 48)
    assert set(resolutions.values()) == {(128, 128), (336, 48)}
    recipe = json.loads((tmp_path / "cache" / "metadata.json").read_text())["recipe"]
    assert (recipe["quantization"], recipe["aspect_ratios"]) == (8, [[1, 1], [8, 1]])
    again = Recipe(max_pixels=128 * 128, bucket_step=8, aspect_ratios=["16:2", "1:1"])
    assert prepare(again, image_dir=pictures, output_dir=tmp_path / "cache").num_encoded == 0, (
        "the same shapes"
    )
    with pytest.raises(RunError, match=r"aspect_ratios was \[\[1, 1\], \[8, 1\]\], now None"):
        prepare(
            Recipe(max_pixels=128 * 128, bucket_step=8), image_dir=pictures, output_dir=tmp_path / "cache"
        )
    status, out, _ = run_main(capsys, "verify", tmp_path / "cache", "--decode")
    assert status == 0, out


def test_default_recipe_records_nothing_new(pictures, tmp_path):
    prepare(SMALL, image_dir=pictures, output_dir=tmp_path / "cache", max_files=1)
    recipe = json.loads((tmp_path / "cache" / "metadata.json").read_text())["recipe"]
    assert "aspect_ratios" not in recipe
    assert recipe["quantization"] == 64
