"""Loaders described by YAML files."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from latentry.errors import ConfigError
from latentry.serve.config import (
    TextToImageDataloaderConfig,
    TextToVideoDataloaderConfig,
    build_text_to_image_multiresolution_dataloader,
    build_video_multiresolution_dataloader,
)
from latentry.serve.dataloader_build import DiffusionDataloaderBuild
from latentry.serve.loader import LatentDataLoader
from latentry.serve.meta_files import MetaFilesDataloaderConfig, build_dataloader
from latentry.serve.mock import MockWanDataloaderConfig, build_mock_dataloader
from latentry.serve.sampler import SequentialBucketSampler

_NEMO = "nemo_automodel.components.datasets.diffusion"
_BUILD_PARAMETERS = ("batch_size", "dp_rank", "dp_world_size")
"""What ``build`` of a configuration dataclass takes."""


def _targets() -> Iterator[tuple[str, Callable[..., Any]]]:
    target: Callable[..., Any]
    for target in (build_text_to_image_multiresolution_dataloader, build_video_multiresolution_dataloader):
        for module in ("latentry", "latentry.loader", _NEMO, f"{_NEMO}.collate_fns"):
            yield f"{module}.{target.__name__}", target
    for target in (TextToImageDataloaderConfig, TextToVideoDataloaderConfig):
        for module in ("latentry", f"{_NEMO}.collate_fns"):
            yield f"{module}.{target.__name__}", target
    for name, config, target in (
        ("meta_files_dataset", MetaFilesDataloaderConfig, build_dataloader),
        ("mock_dataloader", MockWanDataloaderConfig, build_mock_dataloader),
    ):
        for module in ("latentry", f"{_NEMO}.{name}"):
            yield f"{module}.{config.__name__}", config
        for module in (_NEMO, f"{_NEMO}.{name}"):
            yield f"{module}.{target.__name__}", target


_TARGETS: dict[str, Callable[..., Any]] = dict(_targets())
"""The allowed values of ``_target_``. A configuration never causes an import."""


def from_config(
    config: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """Build the loader that a YAML file describes. Returns the loader and its sampler.

    >>> loader, sampler = from_config("train.yaml", batch_size=4, dp_rank=rank, dp_world_size=world)

    The description is under ``data: dataloader:``, under ``dataloader:`` or at the top. Its ``_target_`` names a builder
    or a configuration dataclass; all other fields are its parameters. For a dataclass, ``batch_size``, ``dp_rank`` and
    ``dp_world_size`` are passed to its ``build``.

    Args:
        config: The path of a YAML file, or its content as a dictionary.
        overrides: Parameters that replace those of the description or are added to them.
    """
    if not isinstance(config, (str, os.PathLike, Mapping)):
        raise ConfigError(f"a configuration is a path or a dictionary, not {config!r}")
    source = "the configuration" if isinstance(config, Mapping) else str(config)
    node = _dataloader_node(config if isinstance(config, Mapping) else _read_yaml(Path(config)), source)
    arguments = {**node, **overrides}
    target = arguments.pop("_target_", None)
    if not isinstance(target, str) or target not in _TARGETS:
        raise ConfigError(f"{source}: _target_ is {target!r}; allowed are {', '.join(_TARGETS)}")
    builder = _TARGETS[target]
    parameters = inspect.signature(builder).parameters
    known = [*parameters, *(_BUILD_PARAMETERS if is_dataclass(builder) else ())]
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(known)}"
            raise ConfigError(f"{source}: {builder.__name__} has no parameter {name!r}; {hint}")
    for name, what in (
        ("cache_dir", "the folder of a finished cache"),
        ("meta_folder", "a folder of .meta files"),
    ):
        if name in parameters and name not in arguments:
            raise ConfigError(f"{source}: {name} is missing; it must be {what}")
    if not is_dataclass(builder):
        loader, sampler = builder(**{"batch_size": 1, **arguments})
        return loader, sampler
    build = {"batch_size": 1, "dp_rank": None, "dp_world_size": None}
    build |= {name: arguments.pop(name) for name in _BUILD_PARAMETERS if name in arguments}
    dataclass_config: Any = builder(**arguments)
    built: DiffusionDataloaderBuild = dataclass_config.build(**build)
    return built.dataloader, built.sampler


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def _dataloader_node(config: Any, source: str) -> Mapping[str, Any]:
    node = config
    for key in ("data", "dataloader"):
        if isinstance(node, Mapping) and "_target_" not in node and key in node:
            node = node[key]
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{source} has no 'data: dataloader:' section with a _target_")
    return node
