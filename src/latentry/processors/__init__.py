"""Model families: their encoders, their normalisation, their latent layout.

``PROCESSORS`` is a plain dictionary of names to import paths. A family's module is imported when it is used, and its
heavy packages when its model is loaded. ``docs/how-to/add-a-processor.md`` shows how to add one.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

from latentry.errors import ConfigError
from latentry.processors.base import Fields, Processor, StackedFields

__all__ = [
    "ALIASES",
    "PROCESSORS",
    "Fields",
    "Processor",
    "StackedFields",
    "canonical_name",
    "processor_class",
    "processors_for",
]

PROCESSORS: dict[str, str] = {
    "tiny": "latentry.processors.tiny:TinyProcessor",
    "flux": "latentry.processors.flux:FluxProcessor",
    "wan": "latentry.processors.wan:WanProcessor",
    "wan2.2": "latentry.processors.wan:Wan22Processor",
    "hunyuan": "latentry.processors.hunyuan:HunyuanProcessor",
}

ALIASES: dict[str, str] = {
    "wan2.1": "wan",
    "hunyuanvideo": "hunyuan",
    "hunyuanvideo-1.5": "hunyuan",
}
"""Other names of processors. A recipe replaces them, so that caches record one name only."""


def canonical_name(name: str) -> str:
    """The processor's name in ``PROCESSORS``: ``canonical_name("wan2.1")`` is ``"wan"``.

    Args:
        name: A name or an alias. A name that is not known is returned as it is.
    """
    return ALIASES.get(name, name)


def processors_for(media: str) -> list[str]:
    """The names of the processors that encode a kind of media: ``processors_for("image")`` is ``["tiny", "flux"]``.

    Args:
        media: ``image`` or ``video``.
    """
    return [name for name in PROCESSORS if media in processor_class(name).info.media]


def processor_class(name: str, media: str | None = None) -> type[Processor]:
    """Import a processor by its name: ``processor_class("flux")(model_name, device, dtype)``.

    Args:
        name: A key of ``PROCESSORS``, or an alias of one.
        media: ``image`` or ``video``, if the error about an unknown name should list only the processors that
            encode it.
    """
    found_name = canonical_name(name)
    if found_name not in PROCESSORS:
        names = PROCESSORS if media is None else processors_for(media)
        raise ConfigError(f"unknown processor {name!r}; choose one of {', '.join(names)}")
    module, _, attribute = PROCESSORS[found_name].partition(":")
    found: type[Processor] = getattr(importlib.import_module(module), attribute)
    _require_current_interface(found)
    return found


def _require_current_interface(found: type[Processor]) -> None:
    """Refuse a processor that was written for an earlier release, before anything is loaded."""
    methods = [name for name in vars(Processor) if not name.startswith("_") and not hasattr(found, name)]
    keywords = inspect.signature(found.__init__).parameters
    takes_any = any(keyword.kind is keyword.VAR_KEYWORD for keyword in keywords.values())
    missing = [name for name in ("text_dtype", "device_memory") if not takes_any and name not in keywords]
    lacks = [
        *([f"the methods {', '.join(methods)}"] if methods else []),
        *([f"the constructor's arguments {', '.join(missing)}"] if missing else []),
    ]
    if lacks:
        raise ConfigError(
            f"the processor {found.__name__} lacks {' and '.join(lacks)}; let it inherit from "
            "latentry.processors.Processor, and see docs/how-to/add-a-processor.md"
        )


def __getattr__(name: str) -> Any:
    if name == "Columns":  # its name before version 0.2
        warnings.warn(
            "latentry.processors.Columns is now StackedFields; the old name goes away in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return StackedFields
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
