"""What this process may use of the machine it runs on."""

from __future__ import annotations

import os


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
