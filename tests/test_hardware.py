from __future__ import annotations

import math
import subprocess
import sys

import pytest

from latentry.hardware import available_memory, main_memory, num_cores, num_ranks


def test_importing_does_not_load_torch():
    code = (
        "import sys, latentry.hardware; print(latentry.hardware.num_cores() > 0, 'torch' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize(("value", "expected"), [("4", 4), ("0", 1), ("many", 1), (None, 1)])
def test_ranks_come_from_torchrun(value, expected, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert num_ranks() == expected


def test_a_cpu_has_cores_and_no_memory_limit():
    assert num_cores() >= 1
    assert available_memory("cpu") == math.inf
    assert main_memory() > 1 << 28
