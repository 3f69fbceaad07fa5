"""Whole runs over long clips: windows, scenes, damage, and caches of earlier releases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_files import make_textured_clip, overwrite, packets_of
from helpers import rows_of, stopped_after

from latentry import Recipe, prepare, verify_cache
from latentry.cache.format import recipe_fingerprint
from latentry.cli import main
from latentry.cli.arguments import parse_arguments
from latentry.cli.flags.clips import clip_fields
from latentry.encode.resolved_recipe import ResolvedRecipe
from latentry.errors import LatentryError
from latentry.media.clips.scenes import scene_starts
from latentry.media.clips.timeline import read_timeline
from latentry.media.video_options import VideoOptions
from latentry.processors import processor_class
from latentry.testing import assert_same_cache, make_counter_clip, read_counter


def recipe(**options) -> Recipe:
    return Recipe(size=(128, 64), video=VideoOptions(**options), output_format="meta")


def counters(row: dict) -> list[int]:
    """The numbers that the frames of a sample show."""
    tiny = processor_class("tiny")("embedded", torch.device("cpu"), torch.float32)
    latents = torch.load(row["cache_file"], weights_only=True)["video_latents"]
    frames = tiny.decode_latents(latents)[0].unbind(1)
    return [read_counter(frame.permute(1, 2, 0).numpy()) for frame in frames]


@pytest.fixture
def long_clip(tmp_path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    make_counter_clip(folder / "long.mp4", 100, size=(128, 64))
    return folder


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({"windows": "head"}, [0]),
        ({"windows": "middle"}, [41]),
        ({"windows": "chunks"}, [0, 17, 34, 51, 68]),
        ({"windows": "slide", "window_step_s": 1.0}, [0, 25, 50, 75]),
    ],
)
def test_windows(long_clip, tmp_path, options, starts):
    cache = tmp_path / "cache"
    result = prepare(recipe(target_frames=17, **options), video_dir=long_clip, output_dir=cache)
    assert (result.num_encoded, result.failures) == (len(starts), ())
    rows = rows_of(cache)
    for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
        assert counters(row) == list(range(start, start + 17))
        if options["windows"] == "head":
            assert "window_index" not in row
            continue
        assert (row["window_index"], row["num_windows"]) == (number, len(starts))
        assert row["window_start_s"] == pytest.approx(start / 25)
        assert row["window_frames"] == [start, start + 16]
        assert row["sample_name"] == ("long.mp4" if len(starts) == 1 else f"long.mp4#{number}")
    again = prepare(recipe(target_frames=17, **options), video_dir=long_clip, output_dir=cache)
    assert (again.num_encoded, again.num_already_done) == (0, len(starts))
    checked = verify_cache(cache, decode=True)
    assert checked.exit_status == 0
    assert min(checked.psnr_db.values()) > 20, "the same frames are read again"


def test_windows_by_time(long_clip, tmp_path):
    options = {"target_frames": 5, "target_fps": 5.0, "windows": "chunks"}
    prepare(recipe(**options), video_dir=long_clip, output_dir=tmp_path / "cache")
    assert [counters(row) for row in rows_of(tmp_path / "cache")] == [
        [start + 5 * k for k in range(5)] for start in (0, 25, 50, 75)
    ]


@pytest.mark.parametrize("output_format", ["meta", "packed"])
def test_a_stopped_run_resumes(long_clip, tmp_path, output_format):
    make_counter_clip(long_clip / "other.mkv", 60, size=(128, 64))
    chosen = Recipe(
        size=(128, 64),
        video=VideoOptions(target_frames=9, windows="chunks"),
        output_format=output_format,
    )
    prepare(chosen, video_dir=long_clip, output_dir=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        prepare(chosen, video_dir=long_clip, output_dir=tmp_path / "cache", on_progress=stopped_after(6))
    resumed = prepare(chosen, video_dir=long_clip, output_dir=tmp_path / "cache")
    assert resumed.num_encoded + resumed.num_already_done == 11 + 6
    assert_same_cache(tmp_path / "cache", tmp_path / "whole")


def test_many_windows_are_not_decoded_at_once(long_clip, tmp_path, monkeypatch):
    from latentry.media.video_reader import VideoReader

    sizes = []
    read = VideoReader.read
    monkeypatch.setattr("latentry.encode.running.read_ahead._MAX_BYTES_PER_READ", 3 * 5 * 128 * 64 * 3)
    monkeypatch.setattr(
        VideoReader,
        "read",
        lambda self, file, samples, seed: sizes.append(len(samples)) or read(self, file, samples, seed),
    )
    chosen = Recipe(size=(128, 64), video=VideoOptions(target_frames=5, windows="chunks"))
    prepare(chosen, video_dir=long_clip, output_dir=tmp_path / "cache")
    assert max(sizes) == 3
    assert sum(sizes) == 20


def test_the_plan_says_what_is_cut(long_clip, tmp_path):
    def notes(**options) -> list[str]:
        return list(
            prepare(recipe(**options), video_dir=long_clip, output_dir=tmp_path / "cache", dry_run=True).notes
        )

    assert "more than 65 frames: a sample has 65 of them (--max_frames)" in notes(max_frames=65)
    assert notes() == ["frames counted from the index in the header"]
    assert any("--windows chunks uses them" in note for note in notes(target_frames=17))
    assert len(notes(target_frames=17, windows="chunks")) == 1


def scenes(number: int) -> np.ndarray:
    """Three scenes of 30 frames, with different colours and something that moves."""
    frame = np.full((64, 128, 3), [(250, 20, 20), (20, 60, 20), (210, 220, 250)][number // 30], np.uint8)
    frame[20:40, number : number + 20] = 255
    return frame


def test_scenes_bound_windows(tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    clip = make_textured_clip(folder / "film.mp4", 90, frame=scenes)
    assert scene_starts(clip, read_timeline(clip)) == [0, 30, 60]
    chosen = recipe(target_frames=13, windows="chunks", split_scenes=True)
    result = prepare(chosen, video_dir=folder, output_dir=tmp_path / "cache")
    assert (result.num_encoded, result.failures) == (6, ())
    rows = rows_of(tmp_path / "cache")
    assert [row["window_frames"][0] for row in rows] == [0, 13, 30, 43, 60, 73]
    assert verify_cache(tmp_path / "cache", decode=True).exit_status == 0
    heads = prepare(recipe(split_scenes=True), video_dir=folder, output_dir=tmp_path / "heads")
    assert heads.num_encoded == 3
    too_long = prepare(
        recipe(target_frames=33, split_scenes=True), video_dir=folder, output_dir=tmp_path / "long"
    )
    assert [failure.reason for failure in too_long.failures] == [
        "has 3 scenes, each with fewer than the 33 frames requested"
    ]


def test_scenes_need_their_extra(long_clip, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("latentry.extras.find_spec", lambda name: None if name == "scenedetect" else True)
    arguments = [
        "video",
        "--video_dir",
        str(long_clip),
        "--output_dir",
        str(tmp_path / "cache"),
        "--split_scenes",
    ]
    assert main(arguments) == 1
    assert "pip install 'latentry[scenes]'" in capsys.readouterr().err


# ---- damage ---------------------------------------------------------------------------------


@pytest.fixture
def damaged_clip(tmp_path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    clip = make_textured_clip(folder / "clip.mp4", options={"bf": "0"})
    for position, size, _ in packets_of(clip)[26:29]:
        overwrite(clip, position + size // 3, np.random.default_rng(0).bytes(size // 2))
    make_textured_clip(folder / "good.mp4")
    return folder


def test_damage_fails_the_windows_it_concerns(damaged_clip, tmp_path):
    chosen = recipe(target_frames=12, windows="chunks")
    result = prepare(chosen, video_dir=damaged_clip, output_dir=tmp_path / "cache", verify=True)
    assert [failure.name for failure in result.failures] == ["clip.mp4#2"]
    assert result.failures[0].reason.startswith("is damaged: ")
    assert result.num_encoded == 7
    again = prepare(chosen, video_dir=damaged_clip, output_dir=tmp_path / "cache")
    assert (again.num_encoded, again.num_already_done, len(again.failures)) == (0, 7, 1)


def test_damage_can_be_kept_or_stop_the_run(damaged_clip, tmp_path):
    chosen = recipe(target_frames=12, windows="chunks")
    kept = prepare(chosen, video_dir=damaged_clip, output_dir=tmp_path / "keep", damaged="keep")
    assert (kept.num_encoded, kept.failures) == (8, ())
    assert [row["sample_name"] for row in rows_of(tmp_path / "keep") if row.get("damage")] == ["clip.mp4#2"]
    with pytest.raises(LatentryError, match=r"clip\.mp4 is damaged"):
        prepare(chosen, video_dir=damaged_clip, output_dir=tmp_path / "error", damaged="error")


# ---- recipes of earlier releases ------------------------------------------------------------

NEW_OPTIONS = ("windows", "window_step_s", "max_frames", "split_scenes")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"target_frames": 9}, {"target_frames": 9, "windows": "uniform"}),
        ({"target_frames": 9, "target_fps": 5.0}, {"target_frames": 9, "target_fps": 5.0}),
        ({}, {"windows": "uniform", "max_frames": None}),
        ({"mode": "frames", "num_frames": 4}, {"mode": "frames", "num_frames": 4}),
    ],
)
def test_caches_of_earlier_releases_can_be_added_to(long_clip, tmp_path, old, new):
    cache = tmp_path / "cache"
    prepare(recipe(**new), video_dir=long_clip, output_dir=cache)
    recorded = json.loads((cache / "metadata.json").read_text())["recipe"]
    assert not set(recorded["video"]) & set(NEW_OPTIONS)
    assert recorded["video"] | old == recorded["video"]
    assert ResolvedRecipe.from_recorded(recorded).fingerprint == recipe_fingerprint(recorded)
    make_counter_clip(long_clip / "more.mp4", 100, size=(128, 64))
    added = prepare(recipe(**new), video_dir=long_clip, output_dir=cache)
    assert added.num_already_done > 0
    assert added.num_encoded > 0


def test_another_choice_of_windows_is_another_recipe(long_clip, tmp_path):
    prepare(recipe(target_frames=9, windows="uniform"), video_dir=long_clip, output_dir=tmp_path / "cache")
    with pytest.raises(LatentryError, match="windows was 'uniform', now 'head'; choose"):
        prepare(recipe(target_frames=9), video_dir=long_clip, output_dir=tmp_path / "cache")


# ---- the command ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--mode frames --windows head", "--windows has no effect with --mode frames"),
        ("--mode frames --target_frames 9", "--target_frames has no effect with --mode frames"),
        ("--mode frames --max_frames 9", "--max_frames has no effect with --mode frames"),
        ("--mode frames --split_scenes", "--split_scenes has no effect with --mode frames"),
        ("--num_frames 4", "--num_frames has no effect without --mode frames"),
        ("--short_clips pad", "--short_clips has no effect without --target_frames"),
        ("--target_frames 9 --max_frames 9", "--max_frames has no effect with --target_frames"),
        ("--windows chunks", "--windows chunks needs --target_frames"),
        ("--windows slide --target_frames 9", "--windows slide needs --window_step_s"),
        ("--window_step_s 1 --target_frames 9", "--window_step_s has no effect without --windows slide"),
        ("--windows uniform --target_fps 5", "leave out --target_fps"),
        ("--windows film", "invalid choice: 'film'"),
    ],
)
def test_flags_without_effect_are_errors(long_clip, tmp_path, capsys, flags, says):
    arguments = [
        "video",
        "--video_dir",
        str(long_clip),
        "--output_dir",
        str(tmp_path / "cache"),
        *flags.split(),
    ]
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    assert status == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def command(folder: Path, cache: Path, flags: str, **options) -> list[list[int]]:
    arguments = [
        "video",
        "--video_dir",
        str(folder),
        "--output_dir",
        str(cache),
        "--max_pixels",
        "8192",
        "--quiet",
    ]
    assert main([*arguments, *flags.split()], **options) == 0
    return [counters(row) for row in rows_of(cache)]


def test_the_command_takes_the_beginning_and_the_drop_in_the_whole(long_clip, tmp_path):
    even = np.linspace(0, 99, 9).astype(int).tolist()
    assert command(long_clip, tmp_path / "a", "--target_frames 9") == [list(range(9))]
    assert command(long_clip, tmp_path / "b", "--target_frames 9", whole_clips=True) == [even]
    assert command(long_clip, tmp_path / "c", "--num_frames 9", whole_clips=True) == [even]


@pytest.mark.parametrize(
    ("flags", "whole_clips", "expected"),
    [
        ("", False, ("head", 257)),
        ("--max_frames 0", False, ("head", None)),
        ("", True, ("uniform", None)),
        ("--target_fps 5", True, ("head", None)),
        ("--windows middle", True, ("middle", None)),
    ],
)
def test_defaults_of_the_flags(flags, whole_clips, expected):
    options = parse_arguments(["video", "--video_dir", "a", "--output_dir", "b", *flags.split()])
    options.whole_clips = whole_clips
    video = clip_fields(options)["video"]
    assert (video.windows, video.max_frames) == expected
