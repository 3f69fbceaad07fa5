"""The wheel, installed into an empty environment: first with the core packages only, then with ``[encode]``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import EXAMPLES

import latentry
from latentry.testing import make_image_cache

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


def install(*command: object) -> None:
    """Run pip, or a build that calls it; skip the tests if packages cannot be downloaded."""
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    output = done.stdout + done.stderr
    if done.returncode and ("No matching distribution" in output or "connection broken" in output):
        pytest.skip(f"packages cannot be downloaded here: {output.strip().splitlines()[-1]}")
    assert done.returncode == 0, output


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, so that both are known to be complete."""
    folder = tmp_path_factory.mktemp("dist")
    install(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and its core dependencies."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install(folder / "bin" / "pip", "install", "-c", "constraints.txt", wheel)
    return folder


@pytest.fixture(scope="module")
def encode_environment(wheel, environment) -> Path:
    """The same with the packages for encoding. Tests that use it come last."""
    install(environment / "bin" / "pip", "install", "-c", "constraints.txt", f"{wheel}[encode]")
    return environment


def run(
    environment: Path, folder: Path, program: str, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment, far from the checkout."""
    return subprocess.run(
        [str(environment / "bin" / program), *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )


def test_files_of_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"latentry-{latentry.__version__}.dist-info"
        described = archive.read(f"{info}/METADATA").decode()
    assert wheel.name == f"latentry-{latentry.__version__}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} == {"latentry", info}, "compat/ is not part of the wheel"
    assert {
        f"{info}/licenses/LICENSE",
        f"{info}/licenses/NOTICE",
        "latentry/py.typed",
        "latentry/demo/ATTRIBUTION.md",
        "latentry/demo/clips/bunny.mp4",
        "latentry/demo/pictures/home/captions.jsonl",
        "latentry/processors/assets/tiny_text.npz",
    } <= names
    assert "Project-URL: Homepage, https://github.com/latentry/latentry" in described
    assert "Author: The Latentry developers" in described


def test_core_has_no_encoding_packages(environment, tmp_path):
    listed = run(environment, tmp_path, "pip", "list", "--format=json")
    installed = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert {"latentry", "torch", "pyarrow"} <= installed
    assert not installed & {"av", "pillow", "rich", "simplejpeg", "diffusers", "transformers"}


def test_core_commands(environment, tmp_path):
    done = run(environment, tmp_path, "latentry", "--version")
    assert (done.returncode, done.stdout) == (0, f"latentry {latentry.__version__}\n")
    done = run(environment, tmp_path, "latentry", "processors")
    assert (done.returncode, "hunyuan" in done.stdout) == (0, True), done.stderr
    make_image_cache(tmp_path / "cache", {(256, 256): 5, (320, 192): 3})
    done = run(environment, tmp_path, "latentry", "convert", "cache", "--output_dir", "packed")
    assert done.returncode == 0, done.stderr
    for folder in ("cache", "packed"):
        done = run(environment, tmp_path, "latentry", "verify", folder)
        assert done.returncode == 0, done.stderr
        assert "8 samples, 0 problems" in done.stdout


def test_core_serves(environment, tmp_path):
    make_image_cache(tmp_path / "cache", {(256, 256): 5, (320, 192): 3})
    code = (
        "import latentry, pathlib\n"
        "loader, _ = latentry.build_text_to_image_multiresolution_dataloader(cache_dir='cache', batch_size=2, drop_last=False)\n"
        "print(sum(len(batch['image_latents']) for batch in loader), pathlib.Path(latentry.__file__).parents[4])"
    )
    done = run(environment, tmp_path, "python", "-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["8", str(environment)]


@pytest.mark.parametrize("command", [["image", "--image_dir", EXAMPLES, "--output_dir", "cache"], ["demo"]])
def test_encoding_says_what_to_install(environment, tmp_path, command):
    done = run(environment, tmp_path, "latentry", *command)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith("pip install 'latentry[encode]'")


def test_image_with_encode(encode_environment, tmp_path):
    done = run(
        encode_environment, tmp_path, "latentry", "image", "--image_dir", EXAMPLES / "home",
        "--output_dir", "cache", "--max_images", 1, "--verify",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 encoded, 0 already done, 0 failed" in done.stdout


def test_demo_with_encode(encode_environment, tmp_path):
    done = run(encode_environment, tmp_path, "latentry", "demo", "--output_dir", "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "contact_sheet.png").stat().st_size > 100_000
    assert "Traceback" not in done.stderr
