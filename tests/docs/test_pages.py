"""What the pages say: links lead somewhere, folders and flags are all described, and the words are plain."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "latentry"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

ODD_PHRASES = [
    r"Python's lock",
    r"\bgoes on (from|with|once)\b",
    r"\bfor keeps\b",
    r"\bin earnest\b",
    r"\bso many\b",
    r"\bif need be\b",
    r"\bis mended\b",
    r"\brooms?\b",
    r"\bhopping\b",
    r"\bof their own\b",
]
"""Phrases that have to be read twice, each with a plain alternative: GIL, resume, created if missing, and so on."""


def headings_of(page: Path) -> set[str]:
    """The anchors of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    names = {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return names | set(re.findall(r"^::: (\S+)", text, flags=re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = page if not path else page.parent / path
        assert linked.exists(), f"{page.relative_to(ROOT)} links to {target}, which does not exist"
        if anchor and linked.suffix == ".md":
            assert anchor in headings_of(linked), f"{page.relative_to(ROOT)}: no heading for {target}"


def test_pages_that_the_code_names_exist():
    files = [path for folder in ("src", "tests", "benchmarks", "examples", "training", "scripts", "compat")
             for path in (ROOT / folder).rglob("*") if path.suffix in (".py", "") and path.is_file()]  # fmt: skip
    for file in [*files, *PAGES]:
        for name in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{file.relative_to(ROOT)} names {name}, which does not exist"


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_every_folder_is_described(page):
    """Each module and package at the top of the source tree has a line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in sorted(SOURCE.iterdir()):
        if path.name.startswith("_") or path.name == "py.typed":
            continue
        name = f"{path.name}/" if path.is_dir() else path.name
        assert re.search(rf"(?<![\w/]){re.escape(name)}", text), f"{page} does not describe {name}"


def test_names_on_the_architecture_page_exist():
    """The page and its drawing name classes and files as the code does."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    in_code = set(re.findall(r"^(?:class )?([A-Z]\w+)\b(?=[(:]| = )", code, flags=re.M))
    named = re.findall(r"`([A-Z][a-z]+[A-Z]\w+|Recipe|Plan|Crop|Commit|Row|Columns|Caption|Task)\b", page)
    named += re.findall(r"\b([A-Z][a-z]+[A-Z]\w+)\b", " ".join(re.findall(r'class="type">([^<]+)<', drawing)))
    assert len(named) > 20
    assert set(named) <= in_code, f"not in the code: {sorted(set(named) - in_code)}"
    files = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page)
    files += re.findall(r"[\w/]+(?:\.py|/)", " ".join(re.findall(r'class="code">([^<]+)<', drawing)))
    assert len(files) > 20
    for file in files:
        assert (
            (SOURCE / file).exists()
            or (ROOT / file).exists()
            or (SOURCE / "cache" / file).exists()
            or (SOURCE / "processors" / file).exists()
        ), file


def test_every_flag_is_described():
    from latentry.cli.arguments import build_parser

    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## latentry (\w+)\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S))
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert set(sections) == set(commands.choices)
    for command, parser in commands.choices.items():
        described = sections[command] + (sections["image"] if command == "video" else "")
        for action in parser._actions:
            name = action.option_strings[0] if action.option_strings else action.dest
            if name != "-h":
                assert f"`{name}`" in described, f"commands.md: latentry {command} has {name}"


@pytest.mark.parametrize("phrase", ODD_PHRASES)
def test_words_are_plain(phrase):
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *SOURCE.rglob("*.py")]
    found = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if re.search(phrase, line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []
