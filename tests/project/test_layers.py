"""House rules that a test can check: quiet imports, imports in one direction, a fixed public interface."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import latentry

SOURCE = Path(latentry.__file__).parent

LAYERS = [
    "errors", "counted", "byte_sizes", "extras", "types", "seeds", "hardware", "storage", "crops", "buckets",
    "cache.caption_keys", "cache.packed_format", "cache.locator", "cache.format", "cache.torch_zip", "cache.index", "cache.read",
    "cache.latent_checks", "cache.write", "cache.convert", "cache.verify",
    "serve.row_numbers", "serve.sample_index", "serve.order", "serve.epoch_order", "serve.sampler_state", "serve.progress",
    "serve.sampler", "serve.all_captions", "serve.stacking", "serve.collate",
    "serve.dataset", "serve.accelerate_hooks", "serve.loader", "serve.dataloader_build", "serve.shape_buckets",
    "serve.meta_files", "serve.mock", "serve.config", "serve.yaml_config",
    "sources", "media", "processors.memory", "processors.fused", "processors", "encode.planning.sizes", "encode.recipe", "encode.resolved_recipe", "encode.planning",
    "encode.running", "encode.device_budget", "engines", "report", "encode.progress", "encode.inputs", "encode.decode_check", "encode.verify",
    "encode.prepare", "testing", "demo", "cli",
    "__main__", "_old_names",
]  # fmt: skip
"""From the first layer to the last: a module imports only from its own layer or from earlier ones."""

NEVER = [
    ("serve", ("sources", "media", "processors", "encode", "engines", "report")),
    ("cache.read", ("cache.write", "encode")),
    ("cache.write", ("media", "processors", "encode", "serve")),
]
"""Which part imports nothing of which others, neither directly nor through something else."""

PUBLIC = [
    "BaseMultiresolutionDataset",
    "CacheError",
    "ConfigError",
    "DiffusionDataloaderBuild",
    "LatentryError",
    "MetaFilesDataloaderConfig",
    "MetaFilesDataset",
    "MetaFilesDatasetConfig",
    "MockWanDataloaderConfig",
    "MockWanDatasetConfig",
    "MultiTierBucketCalculator",
    "Recipe",
    "SequentialBucketSampler",
    "StateError",
    "TextToImageDataloaderConfig",
    "TextToImageDataset",
    "TextToImageDatasetConfig",
    "TextToVideoDataloaderConfig",
    "TextToVideoDataset",
    "TextToVideoDatasetConfig",
    "VideoOptions",
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
    heavy = {"torch", "numpy", "PIL", "pyarrow", "msgspec", "yaml", "rich", "diffusers", "transformers"}
    assert not heavy & loaded_after("import latentry")


def test_buckets_need_no_torch():
    assert "torch" not in loaded_after("import latentry; latentry.MultiTierBucketCalculator()")


def test_serving_loads_no_encoding_or_model_library(image_cache):
    code = (
        "import latentry\n"
        f"loader, _ = latentry.build_text_to_image_multiresolution_dataloader(cache_dir={str(image_cache)!r}, num_workers=0)\n"
        "assert len(list(loader)) == 29"
    )
    encoding = {"PIL", "av", "simplejpeg", "rich"}
    models = {"diffusers", "transformers", "accelerate", "torchvision"}
    assert not (encoding | models) & loaded_after(code)


def test_importing_is_quick():
    # Counted, not timed: a bare import adds this package and a few modules of the standard library.
    code = "import sys; before = set(sys.modules); import latentry; print(*(set(sys.modules) - before))"
    added = run_python(code).split()
    assert {name for name in added if name.startswith("latentry")} == {"latentry", "latentry._old_names"}
    assert len(added) < 60


def test_importing_configures_nothing():
    code = "import logging, latentry, latentry.serve.loader; print(logging.getLogger().handlers, logging.getLogger('latentry').handlers)"
    assert run_python(code).strip() == "[] []"


def test_public_names():
    assert sorted(latentry.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(latentry, name).__name__ == name
        assert name in dir(latentry)


def layer_of(module: str) -> str:
    """The layer of a module, named without its leading ``latentry.``."""
    found = [layer for layer in LAYERS if module == layer or module.startswith(f"{layer}.")]
    assert found, f"{module} belongs to no layer; add it to LAYERS"
    return max(found, key=len)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"}
PACKAGES = {"cache", "encode", "serve"}
"""Packages of several layers; their ``__init__`` holds no code."""


def imports_of(path: Path) -> set[str]:
    """The modules of Latentry that a file imports, without their leading ``latentry.``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            wholes = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {w if w.removeprefix("latentry.") in MODULES else str(node.module) for w in wholes}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("latentry.") for name in found if name.startswith("latentry.")} & set(MODULES)


def test_imports_follow_the_layers():
    assert len(MODULES) > 8
    for module, path in MODULES.items():
        imported = imports_of(path)
        if module in PACKAGES:
            assert not imported, f"{path}: the __init__ of several layers imports nothing"
            continue
        for other in imported:
            assert other not in PACKAGES, f"{module} imports the package {other}; name the module"
            assert LAYERS.index(layer_of(other)) <= LAYERS.index(layer_of(module)), (
                f"{module} imports {other}, of a later layer"
            )


@pytest.mark.parametrize(("part", "others"), NEVER)
def test_parts_are_independent(part, others):
    reached = {module for module in MODULES if f"{module}.".startswith(f"{part}.")}
    waiting = list(reached)
    while waiting:
        for module in imports_of(MODULES[waiting.pop()]) - reached:
            reached.add(module)
            waiting.append(module)
    for other in others:
        assert not [module for module in reached if f"{module}.".startswith(f"{other}.")]
