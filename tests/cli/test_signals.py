"""Ctrl-C and SIGTERM: a run stops cleanly, keeps what it committed, and says how to resume."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def sigint_set_to(handler) -> Iterator[None]:
    """Children start with SIGINT ignored if it is ignored here, and with its default otherwise.

    It is ignored here if pytest runs in the background of a non-interactive shell.
    """
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.fixture
def photos(tmp_path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(600):
        Image.effect_noise((300, 300), 50 + i % 50).save(folder / f"{i:04d}.jpg")
    return folder


def start(
    photos: Path, cache: Path, devices: str, sigint=signal.default_int_handler
) -> subprocess.Popen[str]:
    """An encoding run that has written its first files."""
    command = [sys.executable, "-m", "latentry", "image", "--image_dir", str(photos)]
    with sigint_set_to(sigint):
        process = subprocess.Popen(
            [*command, "--output_dir", str(cache), "--devices", devices],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    deadline = time.monotonic() + 60
    while not list(cache.glob("*x*/*.pt")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def assert_stopped(process: subprocess.Popen[str], cache: Path) -> None:
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    # Not always the last line: on a busy machine, Python's own resource tracker may complain after it.
    assert any(line.endswith("rerun the same command to resume") for line in err.splitlines()), err
    assert "Traceback" not in err
    assert not (cache / "metadata.json").exists()
    assert not list(cache.glob("*x*/.*.tmp"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_signal_stops_run(photos, tmp_path, number, devices):
    process = start(photos, tmp_path / "cache", devices)
    process.send_signal(number)
    assert_stopped(process, tmp_path / "cache")


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_run_started_with_sigint_ignored(photos, tmp_path, devices):
    """As in ``command &`` in a script: SIGINT stays ignored, SIGTERM stops the run."""
    process = start(photos, tmp_path / "cache", devices, sigint=signal.SIG_IGN)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    assert_stopped(process, tmp_path / "cache")
