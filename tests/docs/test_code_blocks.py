"""Every command and code block in README, CONTRIBUTING and the documentation is run.

Each page has its own working folder with ``photos/``, ``clips/`` and tiny random models under the default model
names, so the commands run as they are written. The exceptions are in the tables below.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import latentry
from latentry.testing import make_counter_clip, make_video_cache

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"bash", "json", "python", "text", "yaml"}

SMALLER = {
    "--resolution_preset 512p": "--resolution_preset 256p",
    "--resolution_preset 1024p": "--resolution_preset 256p",
    "max_pixels=1024 * 1024": "max_pixels=256 * 256",
    "--target_frames 81": "--target_frames 5",
    "--target_frames 121": "--target_frames 5",
    "--num_frames 40": "--num_frames 2",
}
"""Sizes that take minutes on a CPU, and what runs instead of them."""

NOT_RUN = {
    r"pip install .*": "needs the network; the names are checked by test_install_commands",
    r"git clone .*": "needs the network",
    r"scripts/test\b.*": "runs this test; checked to exist",
    r"latentry .* --device_memory .*": "needs a GPU",
    r"scripts/demo\b.*": "sets up an environment; checked to exist",
}
"""Lines of bash blocks that are not run, and why."""

OTHER_PACKAGES = {"pre-commit"}
"""Packages besides this one that a ``pip install`` may name."""

MODELS = {
    "black-forest-labs/FLUX.1-dev": "flux_folder",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "wan_folder",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v": "hunyuan_folder",
}
"""Default model names, and the fixtures that make tiny models to put there."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    """Of the first line inside the fence, counted from 1."""
    language: str
    title: str
    """The name of the file that the block shows, or nothing."""
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    opened: tuple[int, str, str, str] | None = None
    for number, line in enumerate(lines, start=1):
        fence = re.fullmatch(r'(\s*)```(\w*)(?: title="([^"]+)")?\s*', line)
        if fence is None:
            assert "```" not in line, f"{page}:{number}: unknown fence {line!r}"
        elif opened is None:
            opened = (number, fence[1], fence[2], fence[3] or "")
        else:
            start, indent, language, title = opened
            text = "\n".join(inside.removeprefix(indent) for inside in lines[start : number - 1])
            yield Block(str(page), start + 1, language, title, text + "\n")
            opened = None
    assert opened is None, f"{page}:{opened and opened[0]}: the fence is not closed"


BLOCKS = {page: list(blocks_of(page)) for page in PAGES}
RUN_PAGES = [page for page in PAGES if any(block.language != "text" for block in BLOCKS[page])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_languages_are_known(page):
    for block in BLOCKS[page]:
        assert block.language in LANGUAGES, f"{page}:{block.line}: unknown language {block.language!r}"


def test_files_shown_are_used():
    """A Python file that a page shows is run, or imported, by another block of that page."""
    for page, blocks in BLOCKS.items():
        for block in blocks:
            if block.language == "python" and block.title:
                module = block.title.removesuffix(".py")
                rest = "\n".join(other.text for other in blocks if other is not block)
                assert re.search(rf"\b{module}(\.py\b|:)", rest), (
                    f"{page}:{block.line}: nothing uses {block.title}"
                )


def test_smaller_sizes_are_in_use():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [size for size in SMALLER if size not in text] == []


# ---- lines that are not run -----------------------------------------------------------------


def test_install_commands():
    """Every ``pip install`` names this package, and extras that it has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = 0
    for page in PAGES:
        for command in re.findall(r"pip install ([^`\n]+)", page.read_text(encoding="utf-8")):
            for argument in shlex.split(command, comments=True):
                if argument == "-e" or argument in OTHER_PACKAGES:
                    continue
                name, _, extra = argument.removesuffix("]").partition("[")
                assert name in (project["name"], ".", f"./{project['name']}"), (
                    f"{page}: pip install {command}"
                )
                assert not extra or extra in project["optional-dependencies"], (
                    f"{page}: pip install {command}"
                )
                found += 1
    assert found > 3


def test_scripts_exist():
    for page in PAGES:
        for script in re.findall(r"\bscripts/[\w-]+", page.read_text(encoding="utf-8")):
            assert os.access(ROOT / script, os.X_OK), f"{page} names {script}"


def is_run(line: str) -> bool:
    return not any(re.fullmatch(pattern, line.strip()) for pattern in NOT_RUN)


# ---- running --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The working folder that every page starts with."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "photos" / "trips").mkdir(parents=True)
    noise = np.random.default_rng(0)
    names = [
        "cat",
        "dog",
        "beach",
        "garden",
        "bridge",
        "lamp",
        "trips/red_car",
        "trips/old_boat",
        "trips/harbour",
    ]
    for name in names:
        pixels = noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((96, 96)).save(folder / "photos" / f"{name}.jpg")
    Image.fromarray(pixels).resize((128, 80)).save(folder / "photos" / "wide_street.png")
    (folder / "photos" / "dog.json").write_text(json.dumps({"caption": "a dog in the snow"}))
    (folder / "photos" / "beach.txt").write_text("a beach at noon")
    (folder / "clips").mkdir()
    make_counter_clip(folder / "clips" / "counter.mp4", 25)
    for name, fixture in MODELS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(request.getfixturevalue(fixture))
    latentry.prepare(
        latentry.Recipe(), image_dir=folder / "photos", output_dir=folder / "cache", devices="cpu"
    )
    make_video_cache(folder / "clip_cache", {(256, 192, 9): 4})
    return folder


@pytest.fixture(scope="module")
def runs(
    prepared: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[Path, Future[str]]]:
    """All pages that are to be tested, two at a time: most of a command's time is spent in imports."""
    pages = [
        item.callspec.params["page"]
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_blocks_run"
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {
            page: pool.submit(run_page, page, prepared, tmp_path_factory.mktemp(page.stem)) for page in pages
        }


def run_page(page: Path, prepared: Path, folder: Path) -> str:
    """Run the page's blocks in the folder; an error with their output if one fails."""
    text = "\n".join(block.text for block in BLOCKS[page])
    for path in prepared.iterdir():
        # A page that makes this cache itself does not find one.
        if not re.search(rf"--output_dir {path.name}\b|output_dir=\"{path.name}\"", text):
            shutil.copytree(path, folder / path.name, symlinks=True)
    (folder / ".venv").symlink_to(sys.prefix)
    blocks = []
    for block in BLOCKS[page]:
        if block.language == "text":
            continue
        text = block.text
        for size, smaller in SMALLER.items():
            text = text.replace(size, smaller)
        if block.language == "bash":
            text = "\n".join(line for line in text.splitlines() if is_run(line))
        blocks.append({**asdict(block), "text": text})
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_blocks.py"))],
        input=json.dumps(blocks),
        cwd=folder,
        env=os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # tiny models gain nothing from more, and two pages run at a time
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if result.returncode:
        raise AssertionError(f"a block of {page.relative_to(ROOT)} failed:\n{result.stdout[-6000:]}")
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, runs):
    assert runs[page].result().count("---- ") == sum(block.language != "text" for block in BLOCKS[page])
