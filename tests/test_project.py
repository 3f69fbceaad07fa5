"""The house rules that a machine can check: quiet imports, one direction, a pinned public surface."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import latentry

SOURCE = Path(latentry.__file__).parent

ROOMS = [
    "errors", "machine", "records", "storage", "buckets", "order", "captions", "sources", "media", "processors", "cache",
    "plan", "quality", "device", "texts", "encode", "engines", "sampler", "items", "datasets", "loader", "report", "preparation", "verification", "conversion", "testing", "cli",
    "__main__",
]  # fmt: skip
"""From the first room to the last: a module imports only from rooms before its own, or from its own."""

PUBLIC = [
    "BaseMultiresolutionDataset",
    "CacheError",
    "ConfigError",
    "LatentryError",
    "MultiTierBucketCalculator",
    "Recipe",
    "SequentialBucketSampler",
    "StateError",
    "TextToImageDataset",
    "TextToVideoDataset",
    "VideoChoices",
    "build_text_to_image_multiresolution_dataloader",
    "build_video_multiresolution_dataloader",
    "convert_cache",
    "from_config",
    "prepare",
    "verify_cache",
]


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    ).stdout


def loaded_after(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after running this."""
    output = run_python(
        f"{code}\nimport sys, json\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    )
    return set(json.loads(output.splitlines()[-1]))


def test_importing_loads_nothing_heavy():
    heavy = {"torch", "numpy", "PIL", "pyarrow", "msgspec", "yaml", "diffusers", "transformers"}
    assert not heavy & loaded_after("import latentry")


def test_buckets_need_no_torch():
    assert "torch" not in loaded_after("import latentry; latentry.MultiTierBucketCalculator()")


def test_serving_needs_no_model_library(image_cache):
    code = (
        "import latentry\n"
        f"loader, _ = latentry.build_text_to_image_multiresolution_dataloader(cache_dir={str(image_cache)!r}, num_workers=0)\n"
        "assert len(list(loader)) == 29"
    )
    assert not {"diffusers", "transformers", "accelerate", "torchvision"} & loaded_after(code)


def test_importing_is_quick():
    # Counted, not timed: what a bare import adds is this package and a few of the standard library's.
    code = "import sys; before = set(sys.modules); import latentry; print(*(set(sys.modules) - before))"
    added = run_python(code).split()
    assert [name for name in added if name.startswith("latentry")] == ["latentry"]
    assert len(added) < 60


def test_importing_configures_nothing():
    code = "import logging, latentry, latentry.loader; print(logging.getLogger().handlers, logging.getLogger('latentry').handlers)"
    assert run_python(code).strip() == "[] []"


def test_public_names():
    assert sorted(latentry.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(latentry, name).__name__ == name
        assert name in dir(latentry)


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module or ""]
            if node.module == "latentry":
                names = [f"latentry.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("latentry.")}
    return rooms


def test_imports_only_go_up():
    modules = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]
    assert len(modules) > 8
    for path in modules:
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for imported in imported_rooms(path):
            assert ROOMS.index(imported) <= ROOMS.index(room), f"{room} imports {imported}, a later room"
