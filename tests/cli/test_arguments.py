"""The command line: flags, defaults, help texts, one line for a mistake."""

from __future__ import annotations

import argparse

import pytest
from helpers import EXAMPLES, run_main

import latentry
from latentry.cli.arguments import build_parser, parse_arguments

ON_EXAMPLES = ["--output_dir", "y", "--image_dir", EXAMPLES]
VIDEO = ["video", "--output_dir", "y", "--video_dir", EXAMPLES]


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (commands,) = [
        action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    return commands.choices


def test_version(capsys):
    assert run_main(capsys, "--version") == (0, f"latentry {latentry.__version__}\n", "")


def test_flags_work_with_hyphens():
    options = parse_arguments(
        ["image", "--image-dir", "a", "--output-dir", "b", "--dry-run", "--max-images", "3"]
    )
    assert (options.image_dir, options.output_dir, options.dry_run, options.max_images) == (
        ["a"],
        "b",
        True,
        3,
    )


@pytest.mark.parametrize("command", ["image", "video", "verify", "convert", "processors", "demo"])
def test_help_names_every_default(capsys, command):
    for action in subparsers()[command]._actions:
        assert action.help, f"{action.dest} has no help text"
        takes_value = action.option_strings and action.nargs != 0
        if takes_value and not action.required:
            assert "(default: " in action.help, f"the help text of --{action.dest} does not say its default"
        if takes_value and action.required:
            assert action.help.endswith("(required)")
        if takes_value and action.default is not None:
            assert f"(default: {action.default}" in action.help
    status, out, _ = run_main(capsys, command, "--help")
    assert status == 0
    assert out.startswith(f"usage: latentry {command}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a command: image, video, verify, convert, processors, demo"),
        (["images"], "invalid choice: 'images'"),
        (["image"], "--image_dir"),
        (["image", *ON_EXAMPLES, "--resolution_preset", "512p", "--max_pixels", "9"], "not allowed with"),
        (["image", *ON_EXAMPLES, "--resolution_preset", "500p"], "invalid choice: '500p'"),
        (["image", "--image_dir", "missing", "--output_dir", "y"], "missing does not exist"),
        (["image", *ON_EXAMPLES, "--processor", "sdxl"], "unknown processor 'sdxl'"),
        (
            ["image", *ON_EXAMPLES, "--processor", "flux", "--model_name", "missing"],
            "model 'missing' is not a folder",
        ),
        (["image", *ON_EXAMPLES, "--crop_mode", "left"], "unknown crop_mode 'left'"),
        (["image", *ON_EXAMPLES, "--devices", "gpu"], "unknown device 'gpu'"),
        (["image", *ON_EXAMPLES, "--devices", "cuda:99"], "unknown device 'cuda:99'; this machine has"),
        (["image", "--image_dir", EXAMPLES, "--output_dir", "/proc/cache"], "cannot write to"),
        (["image", *ON_EXAMPLES, "--stochastic"], "leave out --stochastic"),
        (["image", *ON_EXAMPLES, "--max_pixels", "0"], "max_pixels is 0"),
        ([*VIDEO, "--height", "64"], "--height and --width go together"),
        ([*VIDEO, "--height", "64", "--width", "64", "--max_pixels", "9"], "fix the size"),
        (VIDEO, "holds no videos; it and its subfolders have 9 .jpg files"),
        (["image", *ON_EXAMPLES, EXAMPLES], "are the same folder"),
        (["image", *ON_EXAMPLES, EXAMPLES / "home"], "contain each other"),
        (["image", *ON_EXAMPLES, "missing"], "missing does not exist"),
        (["image", *ON_EXAMPLES, "--repeats", "1", "2"], "repeats has 2 numbers for 1 folder"),
        (["image", *ON_EXAMPLES, "--repeats", "0"], "repeats is 0; it must be at least 1"),
        (["image", *ON_EXAMPLES, "--min_pixels", "0"], "min_pixels is 0"),
        (["image", *ON_EXAMPLES, "--min_side", "-1"], "min_side is -1"),
        (["image", *ON_EXAMPLES, "--max_upscale", "0.5"], "max_upscale is 0.5; it must be at least 1"),
        (["image", *ON_EXAMPLES, "--max_upscale", "nan"], "max_upscale is nan"),
        (["image", *ON_EXAMPLES, "--max_crop", "20"], "max_crop is 20; it is a share of the picture"),
        ([*VIDEO, "--max_crop", "0.2", "--no_center_crop"], "max_crop has no effect if nothing is cropped"),
        (["image", *ON_EXAMPLES, "--bucket_step", "20"], "a multiple of 8; the nearest are 16 and 24"),
        (["image", *ON_EXAMPLES, "--bucket_step", "0"], "bucket_step is 0"),
        (["image", *ON_EXAMPLES, "--aspect_ratios", "4x3"], "'4x3' is not an aspect ratio"),
        (["image", *ON_EXAMPLES, "--aspect_ratios", "1:0"], "'1:0' is not an aspect ratio"),
        (["image", *ON_EXAMPLES, "--aspect_ratios", "99:1"], "the aspect ratio 99:1 does not fit"),
        ([*VIDEO, "--height", "64", "--width", "64", "--bucket_step", "64"], "bucket_step has no effect"),
        ([*VIDEO, "--processor", "flux"], "encodes images, not videos"),
        (["verify", "missing"], "no folder"),
    ],
)
def test_mistake_is_one_line_and_exit_status_1(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = run_main(capsys, *arguments)
    assert status == 1
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("latentry")
    assert message in last
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], "a mistake creates no files"
