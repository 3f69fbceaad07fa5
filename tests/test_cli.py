"""The commands as people type them: real processes, exit statuses, one clear line for a mistake."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import EXAMPLES
from PIL import Image

from latentry.cli import main

NEMO = [sys.executable, "-m", "tools.diffusion.preprocessing_multiprocess"]


@pytest.fixture
def run(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        handler = signal.getsignal(signal.SIGTERM)
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            status = exit_.code
        finally:
            signal.signal(signal.SIGTERM, handler)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def image(cache: Path, *more: object) -> list[object]:
    return ["image", "--image_dir", EXAMPLES, "--output_dir", cache, "--max_pixels", 128 * 128, *more]


def test_a_run_ends_with_a_table(run, tmp_path):
    status, out, err = run(*image(tmp_path / "cache"))
    assert status == 0
    assert "12 encoded, 0 already done, 0 failed" in out
    assert "128x128" in out
    assert "3 from jsonl" in out
    assert "no GPU in use: encoding on the CPU" in err
    assert "encode: 12/12, 0 failed" in err
    assert (tmp_path / "cache" / "metadata.json").exists()


def test_flags_may_be_written_with_hyphens(run, tmp_path):
    status, out, _ = run(
        "image", "--image-dir", EXAMPLES, "--output-dir", tmp_path / "c", "--dry-run", "--max-images", 3
    )
    assert status == 0
    assert "3 would be encoded" in out
    assert not (tmp_path / "c").exists()


def test_json_and_quiet(run, tmp_path):
    status, out, _ = run(*image(tmp_path / "cache", "--json", "--verify"))
    result = json.loads(out)
    assert (status, result["encoded"], result["exit_status"]) == (0, 12, 0)
    assert len(result["psnr_db"]) == 12
    assert run(*image(tmp_path / "cache", "--quiet")) == (0, "", "")


def test_some_bad_inputs_are_exit_status_2(run, tmp_path):
    photos = shutil.copytree(EXAMPLES, tmp_path / "photos")
    (photos / "bad.jpg").write_text("no")
    status, out, _ = run(
        "image", "--image_dir", photos, "--output_dir", tmp_path / "cache", "--max_images", 3
    )
    assert status == 2
    assert "is not an image" in out
    assert "failures.jsonl" in out
    status, out, _ = run("image", "--image_dir", photos, "--output_dir", tmp_path / "other", "--dry_run")
    assert status == 2
    assert "bad.jpg is not an image" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a command"),
        (["images"], "invalid choice: 'images'"),
        (["image"], "--image_dir"),
        (
            [
                "image",
                "--image_dir",
                "x",
                "--output_dir",
                "y",
                "--resolution_preset",
                "512p",
                "--max_pixels",
                "9",
            ],
            "not allowed with",
        ),
        (
            ["image", "--image_dir", "x", "--output_dir", "y", "--resolution_preset", "500p"],
            "invalid choice: '500p'",
        ),
        (["image", "--image_dir", "missing", "--output_dir", "y"], "missing does not exist"),
        (
            ["image", "--image_dir", EXAMPLES, "--output_dir", "y", "--processor", "sdxl"],
            "unknown processor 'sdxl'",
        ),
        (
            [
                "image",
                "--image_dir",
                EXAMPLES,
                "--output_dir",
                "y",
                "--processor",
                "flux",
                "--model_name",
                "missing",
            ],
            "is not a folder",
        ),
        (
            ["image", "--image_dir", EXAMPLES, "--output_dir", "y", "--crop_mode", "left"],
            "unknown crop_mode 'left'",
        ),
        (["image", "--image_dir", EXAMPLES, "--output_dir", "/proc/cache"], "cannot be written to"),
        (["image", "--image_dir", EXAMPLES, "--output_dir", "y", "--stochastic"], "leave out --stochastic"),
        (["image", "--image_dir", EXAMPLES, "--output_dir", "y", "--max_pixels", "0"], "max_pixels is 0"),
        (
            ["video", "--video_dir", EXAMPLES, "--output_dir", "y", "--height", "64"],
            "--height and --width go together",
        ),
        (
            [
                "video",
                "--video_dir",
                EXAMPLES,
                "--output_dir",
                "y",
                "--height",
                "64",
                "--width",
                "64",
                "--max_pixels",
                "9",
            ],
            "fix the size",
        ),
        (
            ["video", "--video_dir", EXAMPLES, "--output_dir", "y"],
            "holds no media; looked for files ending in avi, mkv",
        ),
        (
            ["video", "--video_dir", EXAMPLES, "--output_dir", "y", "--processor", "flux"],
            "encodes images, not videos",
        ),
        (["verify", "missing"], "no folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_1(run, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(*arguments)
    assert status == 1
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("latentry")
    assert says in last
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_processors_are_listed(run):
    status, out, _ = run("processors")
    assert status == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "tiny", "flux", "wan", "hunyuan"]
    assert "black-forest-labs/FLUX.1-dev" in out
    assert run("--list_processors")[1] == out


@pytest.mark.slow
def test_the_documented_command(tmp_path):
    listed = subprocess.run([*NEMO, "--list_processors"], capture_output=True, text=True, check=True)
    assert "flux" in listed.stdout
    command = [*NEMO, "image", "--image_dir", EXAMPLES, "--output_dir", tmp_path / "cache"]
    done = subprocess.run(
        [*map(str, command), "--processor", "tiny", "--resolution_preset", "256p"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "12 encoded" in done.stdout


@pytest.fixture
def many(tmp_path) -> Path:
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(600):
        Image.effect_noise((300, 300), 50 + i % 50).save(folder / f"{i:04d}.jpg")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_stopping_says_how_to_go_on(many, tmp_path, how, devices):
    cache = tmp_path / "cache"
    command = [
        sys.executable,
        "-m",
        "latentry",
        "image",
        "--image_dir",
        str(many),
        "--output_dir",
        str(cache),
    ]
    process = subprocess.Popen(
        [*command, "--devices", devices], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(cache.glob("*x*/*.pt")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    asked = time.monotonic()
    os.kill(process.pid, how)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - asked < 20
    assert process.returncode == 130
    assert "the same command goes on" in err.strip().splitlines()[-1]
    assert "Traceback" not in err
    assert not (cache / "metadata.json").exists()
    assert not list(cache.glob("*x*/.*.tmp"))


@pytest.mark.slow
def test_a_terminal_shows_a_bar(tmp_path):
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "latentry", *map(str, image(tmp_path / "cache"))]
    process = subprocess.Popen(command, stderr=terminal, stdout=subprocess.DEVNULL)
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(main_end, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(main_end)
    assert process.wait() == 0
    assert "━".encode() in shown
    assert b"12/12" in shown
