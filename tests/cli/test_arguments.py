"""The command line: flags, defaults, help texts, one line for a mistake."""

from __future__ import annotations

import pytest
from helpers import EXAMPLES, run_main

import latentry
from latentry.cli.arguments import build_parser, parse_arguments, subparsers
from latentry.cli.flag_names import in_flags
from latentry.cli.flags.encoding import PROCESSORS_OF

ON_EXAMPLES = ["--output_dir", "y", "--image_dir", EXAMPLES]
COMMANDS = subparsers(build_parser())
VIDEO = ["video", "--output_dir", "y", "--video_dir", EXAMPLES]


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


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_default(capsys, command):
    for action in COMMANDS[command]._actions:
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
        ([], "name a command: image, video, verify, convert, processors, completion, demo"),
        (["images"], "invalid choice: 'images'"),
        (["image"], "--image_dir"),
        (["image", *ON_EXAMPLES, "--resolution_preset", "512p", "--max_pixels", "9"], "not allowed with"),
        (["image", *ON_EXAMPLES, "--resolution_preset", "500p"], "invalid choice: '500p'"),
        (["image", "--image_dir", "missing", "--output_dir", "y"], "missing does not exist"),
        (
            ["image", *ON_EXAMPLES, "--processor", "sdxl"],
            "unknown processor 'sdxl'; choose one of tiny, flux",
        ),
        (
            [*VIDEO, "--processor", "sdxl"],
            "unknown processor 'sdxl'; choose one of tiny, wan, wan2.2, hunyuan",
        ),
        (
            ["image", *ON_EXAMPLES, "--processor", "flux", "--model_name", "missing"],
            "model 'missing' is not a folder",
        ),
        (["image", *ON_EXAMPLES, "--crop_mode", "left"], "invalid choice: 'left' (choose from"),
        (["image", *ON_EXAMPLES, "--devices", "gpu"], "unknown device 'gpu'; this machine has"),
        (["image", *ON_EXAMPLES, "--devices", "cuda:99"], "there is no device 'cuda:99'; this machine has"),
        (
            ["image", *ON_EXAMPLES, "--devices", "meta"],
            "models cannot run on the device 'meta'; this machine has",
        ),
        (["image", "--image_dir", EXAMPLES, "--output_dir", "/proc/cache"], "cannot write to"),
        (["image", *ON_EXAMPLES, "--stochastic"], "leave out --stochastic"),
        (["image", *ON_EXAMPLES, "--max_pixels", "0"], "argument --max_pixels/--max-pixels: 0 is too small"),
        (["image", *ON_EXAMPLES, "--max_pixels", "100"], ": --max_pixels is 100"),
        (["image", *ON_EXAMPLES, "--max-pixels=100"], ": --max-pixels is 100"),
        (["image", *ON_EXAMPLES, "--max_images", "0"], "argument --max_images/--max-images: 0 is too small"),
        (["image", *ON_EXAMPLES, "--max_failures", "-1"], "it must be at least 0"),
        (
            ["image", *ON_EXAMPLES, "--batch_size", "few"],
            "--batch_size/--batch-size: 'few' is not a whole number",
        ),
        (
            ["image", *ON_EXAMPLES, "--device_memory", "12"],
            ": --device_memory is 12 bytes; it must be at least",
        ),
        (["image", *ON_EXAMPLES, "--device_memory", "12"], "; write 12GB if you mean GB"),
        (
            ["image", *ON_EXAMPLES, "--device_memory", "lots"],
            ": --device_memory: 'lots' is not a size; write for",
        ),
        (["image", *ON_EXAMPLES, "--device-memory", "12 G"], ": --device-memory: '12 G' is not a size"),
        (
            [*VIDEO, "--device_memory", "12GB", "--devices", "cpu"],
            ": --device_memory has no effect on the CPU; leave it out, or encode on a GPU",
        ),
        (["verify", "y", "--device_memory", "12GB"], "unrecognized arguments: --device_memory 12GB"),
        (["image", *ON_EXAMPLES, "--seed", "-1"], "argument --seed: -1 is too small"),
        ([*VIDEO, "--target_frames", "6", "--processor", "wan", "--dry_run"], ": --target_frames is 6"),
        ([*VIDEO, "--num_frames", "8"], "--num_frames has no effect without --mode frames"),
        ([*VIDEO, "--num_frames", "10"], "--num_frames has no effect without --mode frames"),
        ([*VIDEO, "--short_clips", "pad"], "--short_clips has no effect without --target_frames"),
        (
            [*VIDEO, "--mode", "frames", "--short_clips", "pad"],
            "--short_clips has no effect with --mode frames",
        ),
        (
            [*VIDEO, "--mode", "frames", "--target_frames", "5"],
            "--target_frames has no effect with --mode frames; leave it out, or set --num_frames instead",
        ),
        ([*VIDEO, "--stochastic", "--deterministic"], "not allowed with"),
        (
            ["image", *ON_EXAMPLES, "--output_format", "packed", "--shard_size", "5"],
            "--shard_size has no effect",
        ),
        (["verify", "y", "--devices", "cpu"], "--devices has no effect without --decode"),
        ([*VIDEO, "--height", "64"], "--height and --width go together"),
        ([*VIDEO, "--height", "64", "--width", "64", "--max_pixels", "9"], "fix the size"),
        (VIDEO, "holds no videos; it and its subfolders have 9 .jpg files"),
        (["image", *ON_EXAMPLES, EXAMPLES], "are the same folder"),
        (
            ["image", *ON_EXAMPLES, EXAMPLES / "home"],
            f"{EXAMPLES} contains {EXAMPLES / 'home'}; give only one of them",
        ),
        (["image", *ON_EXAMPLES, "missing"], "missing does not exist"),
        (["image", *ON_EXAMPLES, "--repeats", "1", "2"], ": --repeats has 2 numbers for 1 folder;"),
        (
            [
                "image",
                "--image_dir",
                EXAMPLES / "home",
                EXAMPLES / "space",
                "--output_dir",
                "y",
                "--repeats",
                "1",
            ],
            ": --repeats has 1 number for 2 folders; give one for each folder",
        ),
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
        (
            [*VIDEO, "--processor", "flux"],
            "encodes images, not videos; choose one of tiny, wan, wan2.2, hunyuan",
        ),
        (
            ["image", *ON_EXAMPLES, "--processor", "wan"],
            "encodes videos, not images; choose one of tiny, flux",
        ),
        (
            ["image", *ON_EXAMPLES, "--caption_format", "txt", "--caption_field", "usr"],
            "--caption_field has no effect with --caption_format txt, whose files have no keys; leave out one of them",
        ),
        *(
            (
                ["image", *ON_EXAMPLES, "--caption_format", name, "--caption_lines"],
                f"--caption_lines has no effect with --caption_format {name}, which reads no text files",
            )
            for name in ("sidecar", "jsonl", "csv", "meta_json")
        ),
        (
            ["image", *ON_EXAMPLES, "--nonsense"],
            "unrecognized arguments: --nonsense (see latentry image --help)",
        ),
        (["--nonsense", "verify", "y"], "unrecognized arguments: --nonsense (see latentry verify --help)"),
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
    if message.startswith("unknown processor"):
        assert last.endswith(message), "nothing follows the list"
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], "a mistake creates no files"


@pytest.mark.parametrize(
    "flag", [["--windows", "chunks"], ["--window_step_s", "2"], ["--short_clips", "pad"]]
)
def test_a_flag_is_not_exchanged_for_one_of_another_purpose(capsys, flag):
    status, _, err = run_main(capsys, *VIDEO, "--mode", "frames", *flag)
    assert status == 1
    assert err.strip().endswith(f"{flag[0]} has no effect with --mode frames; leave it out")


def test_caption_flags_that_have_an_effect_are_accepted():
    for more in (
        ["--caption_lines"],
        ["--caption_lines", "--caption_format", "txt"],
        ["--caption_field", "usr"],
        ["--caption_field", "usr", "--caption_format", "csv"],
    ):
        assert parse_arguments(["image", "--image_dir", "a", "--output_dir", "b", *more]).command == "image"


def test_choices_in_the_help_are_those_of_the_library():
    """The parser must not import the library, which takes seconds."""
    from latentry.cache.format import OUTPUT_FORMATS
    from latentry.crops import CROP_MODES
    from latentry.encode.recipe import DTYPES
    from latentry.encode.running.read_ahead import DAMAGED
    from latentry.media.images import NO_CROP, RESIZE_MODES
    from latentry.media.video_options import MODES, SHORT_CLIPS
    from latentry.sources.captions import CAPTION_FALLBACKS, CAPTION_FORMATS

    expected = {
        "crop_mode": (*CROP_MODES, NO_CROP),
        "dtype": DTYPES,
        "output_format": OUTPUT_FORMATS,
        "damaged": DAMAGED,
        "resize_mode": RESIZE_MODES,
        "mode": MODES,
        "short_clips": SHORT_CLIPS,
        "caption_format": CAPTION_FORMATS,
        "caption_fallback": CAPTION_FALLBACKS,
    }
    found = set()
    for parser in COMMANDS.values():
        for action in parser._actions:
            if action.dest in expected:
                assert sorted(action.choices) == sorted(expected[action.dest]), action.dest
                found.add(action.dest)
    assert found == expected.keys()


@pytest.mark.parametrize("media", ["image", "video"])
def test_help_lists_the_processors(capsys, media):
    from latentry.processors import PROCESSORS, processor_class

    able = [name for name in PROCESSORS if media in processor_class(name).info.media]
    assert list(PROCESSORS_OF[media]) == able
    _, out, _ = run_main(capsys, media, "--help")
    assert f"{', '.join(able[:-1])} or {able[-1]}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("max_files is 0; it must be at least 1", "--max_images is 0; it must be at least 1"),
        ("seed is -1", "--seed is -1"),
        ("the seed is -1", "the seed is -1"),
        ("seed has 2 numbers", "--seed has 2 numbers"),
        ("seed hashes", "seed hashes"),
        ("choose another output_dir, or replace it", "choose another --output-dir, or replace it"),
        ("/data/output_dir/x is missing", "/data/output_dir/x is missing"),
        ("--output_dir is needed", "--output_dir is needed"),
        ("it was 'output_dir', and output_dir.", "it was 'output_dir', and --output-dir."),
    ],
)
def test_errors_name_flags_as_they_were_typed(message, expected):
    flags = {"max_images", "seed", "output_dir"}
    assert in_flags(message, flags, ["image", "--output-dir=x", "--seed", "-1"]) == expected


def test_given_flags_are_known():
    options = parse_arguments(["image", "--image-dir", "a", "--output_dir", "b", "--see", "42"])
    assert {"image_dir", "output_dir", "seed"} <= options.given
    assert not {"crop_mode", "processor", "default_preset"} & options.given
