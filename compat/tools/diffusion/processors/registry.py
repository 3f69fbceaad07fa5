"""Processors by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

from latentry.errors import ConfigError
from latentry.processors import canonical_name
from tools.diffusion.processors.base import BaseModelProcessor
from tools.diffusion.processors.families import (
    FluxProcessor,
    HunyuanVideoProcessor,
    Wan22Processor,
    WanProcessor,
)

ProcessorT = TypeVar("ProcessorT", bound=type[BaseModelProcessor])


class ProcessorRegistry:
    """Processors by name: ``ProcessorRegistry.get("flux")``.

    Classes that are registered here can be looked up. To encode with a new model family through ``prepare`` or the
    commands, add a processor to ``latentry.processors.PROCESSORS``.
    """

    _classes: ClassVar[dict[str, type[BaseModelProcessor]]] = {
        adapter.name: adapter
        for adapter in (FluxProcessor, WanProcessor, Wan22Processor, HunyuanVideoProcessor)
    }

    @classmethod
    def register(cls, name: str) -> Callable[[ProcessorT], ProcessorT]:
        """A class decorator that makes a processor known under a name."""

        def add(processor: ProcessorT) -> ProcessorT:
            cls._classes[name] = processor
            return processor

        return add

    @classmethod
    def get(cls, name: str) -> BaseModelProcessor:
        """A new processor of this name or alias."""
        found = cls._classes.get(name) or cls._classes.get(canonical_name(name))
        if found is None:
            raise ConfigError(f"unknown processor {name!r}; choose one of {', '.join(cls.list_available())}")
        return found()

    @classmethod
    def list_available(cls) -> list[str]:
        """The names of all processors."""
        return sorted(cls._classes)
