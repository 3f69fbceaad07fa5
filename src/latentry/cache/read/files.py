"""Loads one whole cache file as tensors and plain values, or refuses it.

A file is only ever read by safetensors or by ``torch.load(weights_only=True)``. Neither runs code from the file, and
there is no fallback that would.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from latentry.cache.format import PLAIN_VALUES_KEY
from latentry.errors import CacheFileError, CacheNotFoundError
from latentry.storage import path_inside


def load_cache_file(cache_dir: Path, relative: str) -> dict[str, Any]:
    """The dictionary in a file of the cache.

    >>> load_cache_file(Path("cache"), "512x512/0a1b.meta")["latent"].shape
    torch.Size([16, 64, 64])

    Args:
        cache_dir: The cache.
        relative: The file's path inside the cache.
    """
    path = path_inside(cache_dir, relative)
    try:
        if path.suffix == ".safetensors":
            data = _load_safetensors(path)
        else:
            data = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CacheNotFoundError(f"{path} is missing, but the cache's metadata lists it") from None
    except (PermissionError, IsADirectoryError) as error:
        raise CacheFileError(f"{path} cannot be read: {error.strerror}") from None
    except pickle.UnpicklingError:
        raise CacheFileError(
            f"{path} holds more than tensors and plain values, or is no cache file; it was not loaded"
        ) from None
    except Exception as error:  # the libraries raise many kinds of errors for a damaged file
        reason = str(error).partition("\n")[0]
        raise CacheFileError(f"{path} is truncated or damaged: {reason}") from None
    if not isinstance(data, dict):
        raise CacheFileError(f"{path} holds a {type(data).__name__}, not a dictionary of tensors")
    return data


def _load_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        plain = json.loads((file.metadata() or {}).get(PLAIN_VALUES_KEY, "{}"))
        return {**{key: file.get_tensor(key) for key in file.keys()}, **plain}  # noqa: SIM118 - not a dict
