from __future__ import annotations

import json

import pytest


@pytest.fixture
def folder(tmp_path):
    """Writes files into a folder: text as it is, lists of ``.jsonl`` files line by line, everything else as JSON."""

    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.lower().endswith(".jsonl") and not isinstance(content, str):
            content = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in content)
        elif not isinstance(content, str):
            content = json.dumps(content)
        path.write_text(content, encoding="utf-8")

    write.root = tmp_path
    return write
