"""What this process may use of the machine it runs on."""

from __future__ import annotations

import math
import os

import torch


def num_cores() -> int:
    """The processor's cores; under a scheduler that binds processes to some, only those."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_ranks() -> int:
    """How many processes of one training run share them, as ``torchrun`` says."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def free_bytes(device: torch.device | str) -> float:
    """What can still be allocated on a GPU; of a CPU's memory nothing is said."""
    if torch.device(device).type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def share_of_memory(device: torch.device | str) -> float:
    """A third of a GPU's memory, whatever else is on it at the moment.

    What is sized by it is the same in a run that was stopped and in one that was not.
    """
    if torch.device(device).type != "cuda":
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory / 3
