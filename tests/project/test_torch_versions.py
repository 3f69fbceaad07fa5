"""The tests marked ``torch_versions``, repeated with other releases of torch in environments of their own."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VERSIONS = re.search(r"versions=\((\d.*)\)", (ROOT / "scripts" / "torch-versions").read_text())[1].split()
"""The oldest release that is allowed, and the newest."""


def marked_files() -> list[str]:
    """Test files with marked tests. Others may import packages that those environments do not have."""
    paths = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path != Path(__file__)]
    return [str(path) for path in paths if "pytest.mark.torch_versions" in path.read_text()]


def test_oldest_version_is_the_one_that_pyproject_allows():
    assert f'"torch>={VERSIONS[0].removesuffix(".0")}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_other_torch_version(version):
    python = ROOT / f".venv-torch-{version}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no .venv-torch-{version}; scripts/torch-versions installs it, about 7 GB")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("-c", "import torch; print(torch.__version__.split('+')[0])").strip() == version
    files = marked_files()
    assert files, "no test is marked torch_versions"
    output = run("-m", "pytest", "-q", "-m", "torch_versions", "-p", "no:cacheprovider", *files)
    assert re.search(r"\d+ passed", output), output
    assert not re.search(r"\d+ (skipped|failed|error)", output), output
