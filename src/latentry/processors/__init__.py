"""Model families: their encoders, their normalisation, their latent layout.

``PROCESSORS`` is a plain dictionary of names to import paths. A family's module is imported when it is used, and its
heavy packages when its model is loaded. ``docs/how-to/add-a-processor.md`` shows how to add one.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from latentry.errors import ConfigError
from latentry.processors.base import Fields, Processor, StackedFields

__all__ = ["PROCESSORS", "Fields", "Processor", "StackedFields", "processor_class"]

PROCESSORS: dict[str, str] = {
    "tiny": "latentry.processors.tiny:TinyProcessor",
    "flux": "latentry.processors.flux:FluxProcessor",
    "wan": "latentry.processors.wan:WanProcessor",
    "hunyuan": "latentry.processors.hunyuan:HunyuanProcessor",
}


def processor_class(name: str) -> type[Processor]:
    """Import a processor by its name: ``processor_class("flux")(model_name, device, dtype)``.

    Args:
        name: A key of ``PROCESSORS``.
    """
    if name not in PROCESSORS:
        raise ConfigError(f"unknown processor {name!r}; choose one of {', '.join(PROCESSORS)}")
    module, _, attribute = PROCESSORS[name].partition(":")
    found: type[Processor] = getattr(importlib.import_module(module), attribute)
    return found


def __getattr__(name: str) -> Any:
    if name == "Columns":  # its name before version 0.2
        warnings.warn(
            "latentry.processors.Columns is now StackedFields; the old name goes away in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return StackedFields
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
