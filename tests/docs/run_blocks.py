"""Run the code blocks of one page, in order: ``python run_blocks.py < blocks.json``, in the page's working folder.

A separate process for each page keeps what one page imports or changes away from the others. Python blocks share one
namespace, as they do for a reader who types them into one session.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def run_python(block: dict[str, Any], namespace: dict[str, Any]) -> None:
    # Empty lines in front: a traceback then shows the line of the page.
    code = "\n" * (block["line"] - 1) + block["text"]
    exec(compile(code, block["page"], "exec"), namespace)


def run_bash(block: dict[str, Any]) -> None:
    subprocess.run(["bash", "-euo", "pipefail", "-c", block["text"]], check=True)


def load_yaml(block: dict[str, Any]) -> None:
    content = yaml.safe_load(block["text"])
    if any(key == "_target_" for key in keys_of(content)):
        import latentry

        loader, _ = latentry.from_config(content)
        assert next(iter(loader))["data_type"] in ("image", "video")


def keys_of(content: Any) -> Iterator[Any]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from keys_of(value)


def main() -> None:
    sys.path.insert(0, os.getcwd())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in json.load(sys.stdin):
        print(f"---- {block['page']}, line {block['line']}", flush=True)
        if block["title"]:
            Path(block["title"]).write_text(block["text"])
        if block["language"] == "python" and not block["title"]:
            run_python(block, namespace)
        elif block["language"] == "bash":
            run_bash(block)
        elif block["language"] == "yaml":
            load_yaml(block)
        elif block["language"] == "json":
            json.loads(block["text"])


if __name__ == "__main__":
    main()
