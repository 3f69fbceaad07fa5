"""What this process may use of the machine: cores, ranks, devices and device memory.

A GPU is a device of one of the kinds in ``GPU_KINDS``. Everything that differs between them is here: their names, their
memory, their errors, and which of them have fused encoders. Only CUDA has been measured; the others run the models' own
modules.

Importing this module loads nothing heavy. The functions that ask a GPU import torch when they are called.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from latentry.errors import ConfigError

if TYPE_CHECKING:
    import torch

GPU_KINDS = ("cuda", "xpu", "mps")
"""The kinds of GPUs as torch names them, in the order in which ``auto`` looks for them. AMD's GPUs are ``cuda``, too."""

_OUT_OF_MEMORY = re.compile(
    r"out[ _]?of[ _]?(?:device[ _])?memory"  # CUDA, ROCm, Metal, Level Zero, NVRTC, Triton
    r"|(?<!HOST_)ALLOC(?:ATION)?_?FAILED"  # cuBLAS, hipBLAS, cuDNN, MIOpen
    r"|(?:BLAS|CUDNN)_STATUS_NOT_INITIALIZED"  # a library that could not allocate its handle
    r"|unable to find an engine to execute this computation"  # cuDNN, if no engine's workspace fits
    r"|Invalid buffer size"  # Metal, if one tensor is too large
    r"|OUT_OF_RESOURCES",  # Level Zero
    re.IGNORECASE,
)
"""What libraries say in plain ``RuntimeError``s if a device's memory is too small."""


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


# ---- devices --------------------------------------------------------------------------------


def find_devices(wanted: str) -> list[str]:
    """Turn the value of ``--devices`` into device names.

    >>> find_devices("cpu")
    ['cpu']

    ``auto`` means every GPU of the first kind that this machine has, in the order of ``GPU_KINDS``, or the CPU if it has
    none. Otherwise ``wanted`` is a list such as ``cuda:0,cuda:1``. A plain number is a position in what ``auto`` means.
    """
    if wanted == "auto":
        return _best_gpus() or ["cpu"]
    return [_checked_device(part.strip()) for part in wanted.split(",")]


def devices_of_machine() -> str:
    """A clause for messages that names all devices of this machine."""
    import torch

    *gpus, cpu = [name for kind in GPU_KINDS for name in _gpus(kind)] + ["cpu"]
    names = f"{', '.join(gpus)} and {cpu}" if gpus else cpu
    return f"this machine has {names} (torch {torch.__version__})"


def has_device(device: torch.device | str) -> bool:
    """Whether this machine has a GPU of this name, or it is the CPU. Other kinds of devices are not checked."""
    kind, _, index = str(device).partition(":")
    if kind in GPU_KINDS:
        return 0 <= int(index or 0) < len(_gpus(kind))
    return kind != "cpu" or int(index or 0) == 0


def is_gpu(device: torch.device | str) -> bool:
    """Whether a device from ``find_devices`` is a GPU of any kind."""
    return str(device).partition(":")[0] != "cpu"


def runs_fused_encoders(device: torch.device) -> bool:
    """Whether a device runs the fused encoders, which were written for NVIDIA's GPUs and measured there only."""
    import torch

    return device.type == "cuda" and torch.version.hip is None


def as_current_device(device: str) -> AbstractContextManager[Any]:
    """Make a GPU the current one inside the context: kernels, events and graphs belong to the current device."""
    import torch

    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.device(device)
    return torch.xpu.device(device) if kind == "xpu" else nullcontext()


def _gpus(kind: str) -> list[str]:
    """The names of this machine's GPUs of one kind. They are none if torch was built without it."""
    import torch

    if kind == "mps":
        return ["mps"] if torch.backends.mps.is_available() else []
    return [f"{kind}:{i}" for i in range(torch.get_device_module(kind).device_count())]


def _best_gpus() -> list[str]:
    return next((gpus for kind in GPU_KINDS if (gpus := _gpus(kind))), [])


def _checked_device(wanted: str) -> str:
    import torch

    if wanted.isdecimal():
        gpus = _best_gpus()
        if int(wanted) < len(gpus):
            return gpus[int(wanted)]
        raise ConfigError(f"there is no GPU {wanted}; {devices_of_machine()}")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"unknown device {wanted!r}; {devices_of_machine()}") from None
    if device.type not in (*GPU_KINDS, "cpu"):
        hint = "; torch names AMD's GPUs cuda" if device.type == "hip" else ""
        raise ConfigError(f"models cannot run on the device {wanted!r}{hint}; {devices_of_machine()}")
    if not has_device(wanted):  # torch takes the index modulo 256
        raise ConfigError(f"there is no device {wanted!r}; {devices_of_machine()}")
    return "mps" if device.type == "mps" else wanted


# ---- device memory --------------------------------------------------------------------------


def available_memory(device: torch.device | str) -> float:
    """How many bytes of a GPU's memory torch can still allocate in this process; infinity for a CPU.

    It is what the driver reports as free, or what the limit of the allocator leaves
    (``torch.cuda.set_per_process_memory_fraction``), whichever is less. For ``mps``, whose memory is main memory, it is
    what Metal recommends as the most to use, less what is allocated.
    """
    import torch

    kind = torch.device(device).type
    if kind == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    if kind not in GPU_KINDS:
        return math.inf
    backend = torch.get_device_module(kind)
    free, total = _free_and_total(device)
    reserved = backend.memory_reserved(device)
    allowed = int(total * backend.get_per_process_memory_fraction(device))
    available: int = min(free, allowed - reserved) + reserved - backend.memory_allocated(device)
    return available


@contextmanager
def memory_limit(device: torch.device | str, num_bytes: float) -> Iterator[None]:
    """Let torch allocate at most this many bytes on a GPU inside the context.

    For ``mps`` and for a CPU nothing changes. Torch cannot tell which limit Metal has, so it could not be restored.
    """
    import torch

    kind = torch.device(device).type
    if kind not in ("cuda", "xpu"):
        yield
        return
    backend = torch.get_device_module(kind)
    before = backend.get_per_process_memory_fraction(device)
    _, total = _free_and_total(device)
    backend.set_per_process_memory_fraction(min(before, num_bytes / total), device)
    try:
        yield
    finally:
        backend.set_per_process_memory_fraction(before, device)


def release_cached_memory(device: torch.device | str) -> None:
    """Give the memory that torch keeps for reuse back to the GPU. On a CPU there is none."""
    import torch

    kind = torch.device(device).type
    if kind in GPU_KINDS:
        torch.get_device_module(kind).empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device's memory is too small, whichever library reports it.

    Running out of main memory is not meant. If a CUDA graph is captured at that moment, the end of the capture raises
    another error, and the first one is its context.
    """
    import torch

    found: BaseException | None = error
    while found is not None:
        if isinstance(found, torch.OutOfMemoryError):
            return True
        if isinstance(found, RuntimeError) and _OUT_OF_MEMORY.search(str(found)):
            return True
        found = found.__context__ if "previous error during capture" in str(found) else None
    return False


def _free_and_total(device: torch.device | str) -> tuple[int, int]:
    """The free bytes and all bytes of a GPU that is ``cuda`` or ``xpu``."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)
    try:
        return torch.xpu.mem_get_info(device)
    except RuntimeError:  # integrated GPUs cannot tell what is free
        total: int = torch.xpu.get_device_properties(device).total_memory
        return total, total
