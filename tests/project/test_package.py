"""The package's metadata: extras that match the code, pinned versions, checks that match CI, attribution."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import latentry
from latentry.extras import EXTRAS

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest installs this one there
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DEMO = Path(latentry.__file__).parent / "demo"
PYPI_NAMES = {
    "PIL": "pillow",
    "pillow_heif": "pillow-heif",
    "pillow_jxl": "pillow-jxl-plugin",
    "scenedetect": "scenedetect-headless",
}
"""Import name to package name, where they differ."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}


def test_core_dependencies(project):
    core = {"msgspec", "numpy", "pyarrow", "pyyaml", "safetensors", "shtab", "torch", "xxhash"}
    assert names(project["dependencies"]) == core


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_match_code(project, extra):
    expected = {PYPI_NAMES.get(package, package) for package in EXTRAS[extra]}
    assert names(project["optional-dependencies"][extra]) - {"latentry"} == expected


def test_every_dependency_is_pinned(project):
    pinned = names(
        [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    )
    for requirements in (project["dependencies"], *project["optional-dependencies"].values()):
        assert names(requirements) - {"latentry"} <= pinned


def test_pre_commit_runs_the_checks_of_ci():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["entry"] for repo in config["repos"] for hook in repo["hooks"]}
    lines = (ROOT / "scripts" / "test").read_text().splitlines()
    assert hooks == {line for line in lines if line.startswith((".venv/bin/ruff", ".venv/bin/mypy"))}


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_issue_templates(name):
    template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert {"name", "description", "body"} <= template.keys()
    assert any("latentry --version" in str(field) for field in template["body"])


def test_every_example_file_is_attributed():
    attribution = (DEMO / "ATTRIBUTION.md").read_text()
    media = [p for p in DEMO.rglob("*") if p.suffix in {".jpg", ".png", ".webp", ".mp4"}]
    assert len(media) == 13
    for path in media:
        assert f"`{path.relative_to(DEMO).as_posix().removeprefix('pictures/')}`" in attribution


def test_notice_names_all_derived_data():
    notice = (ROOT / "NOTICE").read_text()
    assert "NVIDIA NeMo AutoModel" in notice
    assert "Blender Foundation" in notice
    for asset in (DEMO.parent / "processors" / "assets").iterdir():
        assert asset.name in notice
