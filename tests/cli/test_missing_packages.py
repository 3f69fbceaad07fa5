"""The core installation serves, converts and checks caches. Other commands say in one line what to install.

Here the optional packages are hidden from a child process; ``tests/project/test_wheel.py`` leaves them out for
real.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import EXAMPLES

from latentry.extras import EXTRAS
from latentry.testing import make_image_cache, make_video_cache

OPTIONAL = [package for packages in EXTRAS.values() for package in packages]
HIDE = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}));"


def run_core(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has the core packages only."""
    command = [sys.executable, "-c", f"{HIDE} {code}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def latentry(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_core("from latentry.cli import main; sys.exit(main(sys.argv[1:]))", *arguments)


@pytest.mark.parametrize("extra", EXTRAS)
def test_packages_are_hidden(extra):
    assert run_core(f"import {EXTRAS[extra][0]}").returncode == 1


def test_serving_needs_the_core_only(image_cache):
    done = run_core(
        "import latentry;"
        f"loader, _ = latentry.build_text_to_image_multiresolution_dataloader(cache_dir={str(image_cache)!r});"
        "assert len(list(loader)) == 29"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("make", [make_image_cache, make_video_cache])
def test_convert_and_verify_need_the_core_only(make, tmp_path):
    shape = (256, 256) if make is make_image_cache else (256, 256, 9)
    cache = make(tmp_path / "cache", {shape: 3})
    done = latentry("convert", cache, "--output_dir", tmp_path / "packed")
    assert done.returncode == 0, done.stderr
    assert "3 samples in" in done.stdout
    for folder in (cache, tmp_path / "packed"):
        done = latentry("verify", folder)
        assert done.returncode == 0, done.stderr
        assert "3 samples, 0 problems" in done.stdout


def test_listing_processors_needs_the_core_only():
    done = latentry("processors")
    assert done.returncode == 0, done.stderr
    assert "hunyuan" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["image", "--image_dir", EXAMPLES, "--output_dir", "cache"],
        ["video", "--video_dir", EXAMPLES.parent / "clips", "--output_dir", "cache"],
        ["verify", "cache", "--decode"],
        ["demo"],
    ],
)
def test_other_commands_say_what_to_install(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = latentry(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "latentry: this needs av, PIL, simplejpeg, rich; install them with: pip install 'latentry[encode]'\n"
    )
    assert list(Path().iterdir()) == []
