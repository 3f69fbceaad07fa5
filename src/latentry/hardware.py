"""What this process may use of the machine: cores, ranks, devices and device memory.

Importing this module loads nothing heavy. The functions that ask a GPU import torch when they are called.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from latentry.errors import ConfigError

if TYPE_CHECKING:
    import torch


def num_cores() -> int:
    """Count the CPU cores this process may use. A scheduler may bind a process to some of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_ranks() -> int:
    """Count the training processes on this machine, as ``torchrun`` reports them; 1 if there is no ``torchrun``."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def main_memory() -> int:
    """The bytes of main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory(device: torch.device | str) -> float:
    """How many bytes of a GPU's memory torch can still allocate in this process; infinity for a CPU.

    It is what the driver reports as free, or what the limit of the allocator leaves
    (``torch.cuda.set_per_process_memory_fraction``), whichever is less.
    """
    import torch

    if torch.device(device).type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free, allowed - reserved) + reserved - torch.cuda.memory_allocated(device)


@contextmanager
def memory_limit(device: torch.device | str, num_bytes: float) -> Iterator[None]:
    """Let torch allocate at most this many bytes on a GPU inside the context. For other devices nothing changes."""
    import torch

    if torch.device(device).type != "cuda":
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(before, num_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def runs_fused_encoders(device: torch.device) -> bool:
    import torch

    return device.type == "cuda" and torch.version.hip is None


def release_cached_memory(device: torch.device | str) -> None:
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def find_devices(wanted: str) -> list[str]:
    """Turn the value of ``--devices`` into device names.

    >>> find_devices("cpu")
    ['cpu']

    ``auto`` means every GPU, or the CPU if there is none. Otherwise ``wanted`` is a list such as
    ``cuda:0,cuda:1``, or ``0,1`` for short.
    """
    import torch

    if wanted == "auto":
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    return [_checked_device(part.strip()) for part in wanted.split(",")]


def _checked_device(wanted: str) -> str:
    import torch

    name = f"cuda:{wanted}" if wanted.isdigit() else wanted
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {wanted!r}; use for example auto, cpu, cuda:0 or 0,1") from None
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError(f"unknown device {name!r}; this machine has {num_gpus} GPUs")
    return name
