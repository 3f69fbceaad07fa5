"""Devices that are neither CUDA nor a CPU, as far as they can be tested without them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL

from latentry import prepare, verify_cache
from latentry.encode import decode_check
from latentry.encode.running.device import copy_to_host, to_host
from latentry.engines import local
from latentry.errors import RunError
from latentry.processors.tiny import TinyProcessor


@pytest.mark.parametrize("copy", [to_host, copy_to_host])
@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_results_of_other_gpus_end_in_main_memory(kind, copy):
    in_main_memory = torch.ones(3)
    on_gpu = SimpleNamespace(
        is_cuda=False, device=SimpleNamespace(type=kind), cpu=lambda: in_main_memory, clone=None
    )
    assert copy(on_gpu) is in_main_memory


@pytest.mark.parametrize(("gpu", "devices"), [("xpu", "xpu:0"), ("mps", "mps"), ("mps", "auto")])
def test_the_default_dtype_of_other_gpus_is_bfloat16(photos, tmp_path, monkeypatch, gpu, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: int(gpu == "xpu"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: gpu == "mps")
    cache = tmp_path / "cache"
    prepare(replace(SMALL, dtype="bfloat16"), image_dir=photos, output_dir=cache, devices="cpu")

    plan = prepare(SMALL, image_dir=photos, output_dir=cache, devices=devices, dry_run=True)
    assert (plan.num_encoded, plan.num_already_done) == (0, 12)
    with pytest.raises(RunError, match="dtype was 'bfloat16', now 'float32'"):
        prepare(SMALL, image_dir=photos, output_dir=cache, devices=f"{gpu},cpu", dry_run=True)


@pytest.mark.parametrize(
    ("device", "message", "says"),
    [
        (
            "mps",
            "The operator 'aten::im2col' is not currently implemented for the MPS device. If you want this op to be",
            "torch cannot run the model on mps: The operator 'aten::im2col' is not currently implemented for the MPS "
            "device; set PYTORCH_ENABLE_MPS_FALLBACK=1, or use --devices cpu",
        ),
        (
            "xpu:1",
            "Could not run 'aten::im2col' with arguments from the 'XPU' backend. This could be because\nthe operator",
            "torch cannot run the model on xpu:1: Could not run 'aten::im2col' with arguments from the 'XPU' backend; "
            "use --devices cpu",
        ),
    ],
)
def test_operations_that_torch_does_not_have_are_one_line(
    photos, tmp_path, monkeypatch, device, message, says
):
    def encode_pixels(*_: object) -> None:
        raise NotImplementedError(message)

    monkeypatch.setattr(TinyProcessor, "encode_pixels", encode_pixels)
    # The run has a device of this name, and works on the CPU.
    named = local._device_errors_in_one_line
    monkeypatch.setattr(local, "_device_errors_in_one_line", lambda _: named(device))
    with pytest.raises(RunError) as caught:
        prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", devices="cpu")
    assert str(caught.value) == says


def test_a_processor_without_a_method_is_a_bug(photos, tmp_path, monkeypatch):
    def encode_pixels(*_: object) -> None:
        raise NotImplementedError("encode_pixels")

    monkeypatch.setattr(TinyProcessor, "encode_pixels", encode_pixels)
    with pytest.raises(NotImplementedError, match="encode_pixels"):
        prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", devices="cpu")


def test_decoding_has_its_device_as_the_current_one(photos, tmp_path, monkeypatch):
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", max_files=1)
    current: list[str] = []
    seen = []

    @contextmanager
    def as_current_device(device: str):
        current.append(device)
        yield
        current.pop()

    original = TinyProcessor.decode_latents
    monkeypatch.setattr(decode_check, "as_current_device", as_current_device)
    monkeypatch.setattr(
        TinyProcessor,
        "decode_latents",
        lambda self, latents: (seen.append(list(current)), original(self, latents))[1],
    )
    assert verify_cache(tmp_path / "cache", decode=True, device="cpu").exit_status == 0
    assert seen == [["cpu"]]
