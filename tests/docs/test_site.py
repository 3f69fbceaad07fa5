"""The documentation site builds without a warning and without the network, and needs no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    nowhere = "http://127.0.0.1:9"
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    return folder


def test_every_page_is_built(site):
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "index.md"]
    for page in pages:
        relative = page.relative_to(ROOT / "docs").with_suffix("")
        assert (site / relative / "index.html").is_file(), relative


def test_pages_load_nothing_from_other_hosts(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(https?://[^"]+)"', page.read_text()
        )
        assert loaded == [], f"{page.relative_to(site)} loads {loaded}"


def test_public_names_are_documented(site):
    import latentry

    reference = (site / "reference" / "python-api" / "index.html").read_text()
    errors = {"CacheError", "ConfigError", "LatentryError", "StateError"}
    for name in latentry.__all__:
        anchor = f"latentry.errors.{name}" if name in errors else f"latentry.{name}"
        assert f'id="{anchor}"' in reference, f"{anchor} is missing from docs/reference/python-api.md"


def test_docstring_examples_are_code_blocks(site):
    reference = (site / "reference" / "python-api" / "index.html").read_text()
    assert '<span class="gp">&gt;&gt;&gt; </span>' in reference
    assert "<blockquote>" not in reference
