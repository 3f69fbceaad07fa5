"""Cores, ranks and the names of devices. Machines with GPUs are simulated by replacing what torch reports."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from latentry.errors import ConfigError
from latentry.hardware import (
    as_current_device,
    available_memory,
    find_devices,
    has_device,
    is_gpu,
    main_memory,
    num_cores,
    num_ranks,
    runs_fused_encoders,
)

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch) -> Machine:
    """Sets how many GPUs of each kind torch finds."""

    def build(*, cuda: int = 0, xpu: int = 0, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.xpu, "device_count", lambda: xpu)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return build


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


# ---- names ----------------------------------------------------------------------------------

CUDA, XPU, MPS, NONE = {"cuda": 2}, {"xpu": 2}, {"mps": True}, {}


@pytest.mark.parametrize(
    ("gpus", "wanted", "expected"),
    [
        (CUDA, "auto", ["cuda:0", "cuda:1"]),
        (XPU, "auto", ["xpu:0", "xpu:1"]),
        (MPS, "auto", ["mps"]),
        (NONE, "auto", ["cpu"]),
        ({**CUDA, **XPU}, "auto", ["cuda:0", "cuda:1"]),
        ({**XPU, **MPS}, "auto", ["xpu:0", "xpu:1"]),
        (CUDA, "1,0", ["cuda:1", "cuda:0"]),
        (XPU, "1", ["xpu:1"]),
        ({**CUDA, **XPU}, "1", ["cuda:1"]),
        (MPS, "0", ["mps"]),
        (CUDA, "cuda", ["cuda"]),
        (CUDA, "cuda:1, cpu", ["cuda:1", "cpu"]),
        (XPU, "xpu,xpu:1", ["xpu", "xpu:1"]),
        ({**CUDA, **XPU}, "cuda:0,xpu:0", ["cuda:0", "xpu:0"]),
        (MPS, "mps", ["mps"]),
        (MPS, "mps:0", ["mps"]),
        (NONE, "cpu,cpu", ["cpu", "cpu"]),
    ],
)
def test_names_of_devices(machine, gpus, wanted, expected):
    machine(**gpus)
    assert find_devices(wanted) == expected


@pytest.mark.parametrize(
    ("gpus", "wanted", "says"),
    [
        (NONE, "cuda:0", "there is no device 'cuda:0'; this machine has cpu (torch "),
        (NONE, "xpu", "there is no device 'xpu'; this machine has cpu (torch "),
        (NONE, "mps", "there is no device 'mps'; this machine has cpu (torch "),
        (NONE, "0", "there is no GPU 0; this machine has cpu (torch "),
        (CUDA, "cuda:2", "there is no device 'cuda:2'; this machine has cuda:0, cuda:1 and cpu (torch "),
        (CUDA, "cuda:256", "there is no device 'cuda:256'; this machine has cuda:0, cuda:1 and cpu (torch "),
        (CUDA, "cuda:200", "there is no device 'cuda:200'; this machine has cuda:0, cuda:1 and cpu (torch "),
        (CUDA, "cuda:0,2", "there is no GPU 2; this machine has cuda:0, cuda:1 and cpu (torch "),
        (XPU, "cuda:0", "there is no device 'cuda:0'; this machine has xpu:0, xpu:1 and cpu (torch "),
        (XPU, "xpu:7", "there is no device 'xpu:7'; this machine has xpu:0, xpu:1 and cpu (torch "),
        (MPS, "mps:1", "there is no device 'mps:1'; this machine has mps and cpu (torch "),
        (MPS, "1", "there is no GPU 1; this machine has mps and cpu (torch "),
        (NONE, "cpu:1", "there is no device 'cpu:1'; this machine has cpu (torch "),
        (CUDA, "gpu", "unknown device 'gpu'; this machine has cuda:0, cuda:1 and cpu (torch "),
        (CUDA, "cuda:0,", "unknown device ''; this machine has"),
        (CUDA, "auto,cpu", "unknown device 'auto'; this machine has"),
        (NONE, "meta", "models cannot run on the device 'meta'; this machine has cpu (torch "),
        (MPS, "vulkan", "models cannot run on the device 'vulkan'; this machine has mps and cpu (torch "),
        (NONE, "privateuseone:0", "models cannot run on the device 'privateuseone:0'; this machine has cpu"),
        (
            CUDA,
            "hip:0",
            "models cannot run on the device 'hip:0'; torch names AMD's GPUs cuda; this machine has",
        ),
    ],
)
def test_names_that_are_refused(machine, gpus, wanted, says):
    machine(**gpus)
    with pytest.raises(ConfigError) as caught:
        find_devices(wanted)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_gpus_of_every_kind_are_gpus():
    assert [name for name in ("cuda", "cuda:1", "xpu:0", "mps", "cpu", "cpu:0") if not is_gpu(name)] == [
        "cpu",
        "cpu:0",
    ]
    assert is_gpu(torch.device("mps"))


def test_devices_of_a_loader(machine):
    machine(xpu=1)
    assert has_device(torch.device("xpu:0"))
    assert not has_device(torch.device("xpu:1"))
    assert not has_device("mps")
    assert has_device("meta")


@pytest.mark.parametrize(
    ("device", "hip", "expected"),
    [
        ("cuda:1", None, True),
        ("cuda:0", "6.4", False),
        ("xpu", None, False),
        ("mps", None, False),
        ("cpu", None, False),
    ],
)
def test_fused_encoders_are_for_nvidia(monkeypatch, device, hip, expected):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert runs_fused_encoders(torch.device(device)) is expected


@pytest.mark.parametrize(
    ("device", "entered"),
    [("cuda:1", ["cuda cuda:1"]), ("xpu:1", ["xpu xpu:1"]), ("mps", []), ("cpu", [])],
)
def test_kernels_run_on_the_device_of_the_worker(monkeypatch, device, entered):
    found = []

    class Context:
        def __init__(self, text: str) -> None:
            self.text = text

        def __enter__(self) -> None:
            found.append(self.text)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "device", lambda name: Context(f"cuda {name}"))
    monkeypatch.setattr(torch.xpu, "device", lambda name: Context(f"xpu {name}"))
    with as_current_device(device):
        assert found == entered
