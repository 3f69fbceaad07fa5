"""Memory of devices, and the errors that mean that it is too small. What torch reports of GPUs is replaced."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from latentry.hardware import available_memory, is_out_of_memory, memory_limit, release_cached_memory

GB = 10**9


class Allocator:
    """Memory of a GPU as ``torch.cuda`` and ``torch.xpu`` report it."""

    def __init__(self, monkeypatch, module, *, free: int | None, reserved: int, allocated: int) -> None:
        self.fraction = 1.0
        self.free = free
        monkeypatch.setattr(module, "mem_get_info", self.mem_get_info)
        monkeypatch.setattr(module, "memory_reserved", lambda _: reserved)
        monkeypatch.setattr(module, "memory_allocated", lambda _: allocated)
        monkeypatch.setattr(module, "get_per_process_memory_fraction", lambda _: self.fraction)
        monkeypatch.setattr(module, "set_per_process_memory_fraction", self.set_fraction)
        monkeypatch.setattr(module, "get_device_properties", lambda _: SimpleNamespace(total_memory=20 * GB))

    def mem_get_info(self, _: object) -> tuple[int, int]:
        if self.free is None:
            raise RuntimeError("The device doesn't support querying the available free memory.")
        return self.free, 20 * GB

    def set_fraction(self, fraction: float, _: object) -> None:
        assert isinstance(fraction, float)
        self.fraction = fraction


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_memory_that_torch_can_still_allocate(monkeypatch, kind):
    module = getattr(torch, kind)
    allocator = Allocator(monkeypatch, module, free=8 * GB, reserved=3 * GB, allocated=1 * GB)
    assert available_memory(f"{kind}:0") == 10 * GB  # 8 are free, and 2 are reserved without being allocated
    allocator.fraction = 0.4
    assert available_memory(f"{kind}:0") == 7 * GB  # torch may have 8, and 1 is allocated


def test_an_integrated_gpu_does_not_tell_what_is_free(monkeypatch):
    allocator = Allocator(monkeypatch, torch.xpu, free=None, reserved=3 * GB, allocated=1 * GB)
    assert available_memory("xpu") == 19 * GB
    with memory_limit("xpu", 5 * GB):
        assert allocator.fraction == 0.3  # besides what is allocated already


@pytest.mark.parametrize(("allocated", "expected"), [(4 * GB, 6 * GB), (11 * GB, 0)])
def test_memory_of_mps(monkeypatch, allocated, expected):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GB)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: allocated)
    assert available_memory("mps") == expected


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_limit_of_memory_ends_with_its_context(monkeypatch, kind):
    allocator = Allocator(monkeypatch, getattr(torch, kind), free=8 * GB, reserved=0, allocated=0)
    with memory_limit(kind, 5 * GB):
        assert allocator.fraction == 0.25
        with memory_limit(kind, 10 * GB):
            assert allocator.fraction == 0.25, "an inner limit does not raise an outer one"
        with memory_limit(kind, math.inf):
            assert allocator.fraction == 0.25
    assert allocator.fraction == 1.0
    with pytest.raises(KeyboardInterrupt), memory_limit(kind, 5 * GB):
        raise KeyboardInterrupt
    assert allocator.fraction == 1.0


@pytest.mark.parametrize("device", ["mps", "cpu"])
def test_devices_without_a_limit(monkeypatch, device):
    def fail(*_: object) -> None:
        raise AssertionError("the limit of this device could not be restored")

    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", fail)
    with memory_limit(device, 1):
        pass


@pytest.mark.parametrize(
    ("device", "released"), [("cuda:1", ["cuda"]), ("xpu:0", ["xpu"]), ("mps", ["mps"]), ("cpu", [])]
)
def test_cached_memory_is_released_by_its_own_backend(monkeypatch, device, released):
    found: list[str] = []
    for kind in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, kind), "empty_cache", lambda kind=kind: found.append(kind))
    release_cached_memory(device)
    release_cached_memory(torch.device(device))
    assert found == released * 2


# ---- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB",
        "HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 128.00 GiB",
        "XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB",
        "MPS backend out of memory (MPS allocated: 8.89 GB, other allocations: 172.98 MB, max allowed: 9.07 GB). "
        "Tried to allocate 6.25 MB on private pool.",
        "Invalid buffer size: 19.38 GiB",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "nvrtc: error: failed: NVRTC_ERROR_OUT_OF_MEMORY",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "miopenStatusAllocFailed",
        "FIND was unable to find an engine to execute this computation",
        "GET was unable to find an engine to execute this computation",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    ],
)
def test_errors_that_mean_memory(text):
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text)), "libraries raise RuntimeError"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
        "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        "level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
        "out of resource: shared memory, Required: 270336, Hardware limit: 232448.",
        "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu!",
        "",
    ],
)
def test_errors_that_mean_something_else(text):
    assert not is_out_of_memory(RuntimeError(text))


def test_torch_has_a_class_for_it():
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(MemoryError("out of memory")), "that is main memory"
    assert not is_out_of_memory(KeyboardInterrupt())


class FailedCapture:
    """Ends as the capture of a CUDA graph does after an error inside of it."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("inside", "expected"),
    [(torch.OutOfMemoryError("CUDA out of memory."), True), (RuntimeError("other"), False)],
)
def test_memory_that_runs_out_while_a_graph_is_captured(inside, expected):
    with pytest.raises(RuntimeError, match="previous error during capture") as caught, FailedCapture():
        raise inside
    assert is_out_of_memory(caught.value) is expected


def test_an_error_after_a_handled_one_is_another_error():
    error = RuntimeError("shapes differ")
    error.__context__ = torch.OutOfMemoryError()
    assert not is_out_of_memory(error)
