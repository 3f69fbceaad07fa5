"""Names from before version 0.2 keep working for one release, with a ``DeprecationWarning``.

``import latentry`` appends one finder to ``sys.meta_path``. It is asked only for modules that Python finds
nowhere else, and it answers only for the old modules below. An old module loads no code of its own: it looks
up each name in the modules that took its place.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

RENAMED_EXPORTS = {"VideoChoices": "VideoOptions"}
"""Old to new names among the exports of ``latentry`` itself."""

MOVED_MODULES: dict[str, tuple[str, ...]] = {
    "latentry.captions": ("latentry.sources.captions",),
    "latentry.conversion": ("latentry.cache.convert",),
    "latentry.datasets": ("latentry.serve.dataset",),
    "latentry.loader": (
        "latentry.serve.config",
        "latentry.serve.yaml_config",
        "latentry.serve.loader",
        "latentry.serve.collate",
    ),
    "latentry.machine": ("latentry.hardware",),
    "latentry.order": ("latentry.serve.order", "latentry.seeds"),
    "latentry.plan": (
        "latentry.encode.recipe",
        "latentry.encode.resolved_recipe",
        "latentry.encode.planning.plan",
        "latentry.cache.format",
    ),
    "latentry.preparation": ("latentry.encode.prepare",),
    "latentry.records": ("latentry.types", "latentry.cache.write.commits"),
    "latentry.sampler": ("latentry.serve.sampler", "latentry.serve.sampler_state"),
    "latentry.verification": ("latentry.encode.verify", "latentry.cache.verify"),
    "latentry.cache.files": ("latentry.cache.read.files",),
    "latentry.media.headers": ("latentry.media.formats.jpeg_header",),
    "latentry.media.kinds": (
        "latentry.media.reader",
        "latentry.media.image_reader",
        "latentry.media.video_reader",
        "latentry.media.video_options",
    ),
    "latentry.processors.gpu": ("latentry.processors.fused",),
    "latentry.processors.gpu.causal": ("latentry.processors.fused.causal",),
    "latentry.processors.gpu.fused": ("latentry.processors.fused.ops", "latentry.hardware"),
    "latentry.processors.gpu.replay": ("latentry.processors.fused.cuda_graphs",),
    "latentry.processors.gpu.t5": ("latentry.processors.fused.t5",),
}
"""Old module to the modules that hold its names now, in the order in which they are searched."""

RENAMED: dict[str, dict[str, str]] = {
    "latentry.media.headers": {"jpeg_header": "read_jpeg_header"},
    "latentry.media.kinds": {
        "Cut": "Crop",
        "Extent": "ProbeResult",
        "Images": "ImageReader",
        "Medium": "MediaReader",
        "VideoChoices": "VideoOptions",
        "Videos": "VideoReader",
    },
    "latentry.order": {"Leg": "Segment", "derived_key": "derived_seed"},
    "latentry.records": {"BucketShape": "BucketKey"},
    "latentry.processors.gpu.causal": {"Memory": "FrameCache", "Stretches": "TemporalChunks"},
    "latentry.processors.gpu.replay": {"Replayed": "GraphedFunction"},
    "latentry.processors.gpu.t5": {"TextEncoder": "T5Encoder"},
}
"""Old to new names of what an old module held."""


class _OldModule(ModuleType):
    """Stands for a module that moved."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            new_name = RENAMED.get(self.__name__, {}).get(name, name)
            for module in map(importlib.import_module, MOVED_MODULES[self.__name__]):
                if hasattr(module, new_name):
                    return getattr(module, new_name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _OldModuleFinder:
    """Finds old modules, and loads them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MOVED_MODULES:
            return None
        is_package = any(other.startswith(f"{name}.") for other in MOVED_MODULES)
        return ModuleSpec(name, self, is_package=is_package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        new = " and ".join(MOVED_MODULES[module.__name__])
        warnings.warn(
            f"{module.__name__} has moved to {new}; the old name goes away in the next release",
            DeprecationWarning,
            stacklevel=2,
        )


def renamed_export(name: str) -> str:
    """The new name of a renamed export of ``latentry``, after a warning."""
    new_name = RENAMED_EXPORTS[name]
    warnings.warn(
        f"latentry.{name} is now latentry.{new_name}; the old name goes away in the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    return new_name


sys.meta_path.append(_OldModuleFinder())
