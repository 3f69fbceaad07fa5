"""The memory budget of a run: which one is chosen, who keeps it, and where it is recorded."""

from __future__ import annotations

import json
import logging
import math
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import dying_process, run_main, silent_process, stopped_after

from latentry import Recipe, convert_cache, prepare, verify_cache
from latentry.cache.format import read_metadata
from latentry.encode import device_budget
from latentry.encode.device_budget import NO_BUDGET, DeviceBudget, given_budget, run_budget
from latentry.encode.planning import tasks
from latentry.engines import local
from latentry.errors import ConfigError, MetadataError, RunError
from latentry.processors import PROCESSORS
from latentry.processors.tiny import TinyProcessor
from latentry.testing import assert_same_cache

GB = 10**9
MAY_DIFFER = "the last bits of latents may differ from those of an uninterrupted run"


# ---- which budget ---------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch) -> Callable[..., None]:
    """Pretend that devices have this much memory available, whichever process asks."""

    def have(**memory: float) -> None:
        by_name = {name.replace("_", ":"): available for name, available in memory.items()}
        monkeypatch.setattr(device_budget, "available_memory", by_name.__getitem__)
        monkeypatch.setattr(device_budget, "_asked_in_process", device_budget._asked)

    return have


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("12GB", 12 * GB),
        ("11.5GB", 11_500_000_000),
        ("12GiB", 12 << 30),
        ("12000MB", 12 * GB),
        ("12 gb", 12 * GB),
        ("12000000000", 12 * GB),
        (12 * GB, 12 * GB),
        (12e9, 12 * GB),
        (None, None),
    ],
)
def test_given_budget(gpus, given, expected):
    gpus(cuda_0=16 * GB)
    assert given_budget(given, ["cuda:0"]) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "17GB",
            r"device_memory is 17 GB, but cuda:0 has 15\.99 GB available; give at most that, or end other",
        ),
        ("16GB", r"device_memory is 16 GB, but cuda:0 has 15\.99 GB available"),
        ("0.4GB", r"device_memory is 0\.4 GB; it must be at least 0\.5 GB$"),
        ("12", "device_memory is 12 bytes; it must be at least 0.5 GB; write 12GB if you mean GB"),
        (12, "write 12GB if you mean GB"),
        ("12000", "write 12000MB if you mean MB"),
        (0, r"device_memory is 0 bytes; it must be at least 0\.5 GB$"),
        (-12, r"device_memory is -12 bytes; it must be at least 0\.5 GB$"),
        ("lots", "device_memory: 'lots' is not a size; write for example 12GB"),
        (True, "device_memory is True; give a size such as '12GB', or a number of bytes"),
        (math.inf, "device_memory is inf; give a size"),
    ],
)
def test_given_budgets_that_cannot_be_kept(gpus, given, says):
    gpus(cuda_0=16 * GB - 1)
    with pytest.raises(ConfigError, match=says) as raised:
        given_budget(given, ["cuda:0"])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_a_budget_has_no_effect_on_a_cpu(devices):
    with pytest.raises(ConfigError, match="device_memory has no effect on the CPU; leave it out"):
        given_budget("12GB", devices)
    assert given_budget(None, devices) is None
    assert run_budget(None, None, devices) == NO_BUDGET
    assert NO_BUDGET.device_memory == math.inf


def test_every_device_must_have_what_is_given(gpus):
    gpus(cuda_0=16 * GB, cuda_1=8 * GB)
    assert given_budget("8GB", ["cuda:0", "cuda:1"]) == 8 * GB
    with pytest.raises(ConfigError, match="but cuda:1 has 8 GB available"):
        given_budget("12GB", ["cuda:0", "cuda:1"])


def test_workers_on_one_device_share_its_memory(gpus):
    gpus(cuda_0=20 * GB)
    devices = ["cuda:0", "cuda", "cpu"]
    assert run_budget(None, None, devices) == DeviceBudget(10 * GB, is_limit=False)
    with pytest.raises(ConfigError, match="cuda:0 has 10 GB available for each of its 2 workers; give"):
        given_budget("12GB", devices)


@pytest.mark.parametrize(
    ("available", "expected"),
    [(16 * GB, 16.0), (15.99 * GB, 15.5), (15.4 * GB, 15.0), (0.99 * GB, 0.5), (141.3 * GB, 141.0)],
)
def test_default_is_rounded_down(gpus, available, expected):
    gpus(cuda_0=available)
    assert run_budget(None, None, ["cuda:0"]) == DeviceBudget(int(expected * GB), is_limit=False)


def test_default_is_the_least_of_all_devices(gpus):
    gpus(cuda_0=23.7 * GB, cuda_1=11.3 * GB, cuda_2=math.inf)
    assert run_budget(None, None, ["cuda:0", "cuda:1", "cuda:2", "cpu"]).num_bytes == 11 * GB


def test_devices_that_do_not_tell_their_memory(gpus):
    gpus(mps_0=math.inf)
    assert run_budget(None, None, ["mps"]) == NO_BUDGET
    assert given_budget("12GB", ["mps"]) == 12 * GB


def test_full_devices_are_an_error(gpus):
    gpus(cuda_0=16 * GB, cuda_1=0.3 * GB)
    with pytest.raises(
        ConfigError, match=r"^cuda:1 has 0\.3 GB of memory available, and a run needs at least 0\.5 GB; end"
    ):
        run_budget(None, None, ["cuda:0", "cuda:1"])


def test_recorded_budget_is_used_again(gpus, caplog):
    gpus(cuda_0=23 * GB)
    assert run_budget(None, 12 * GB, ["cuda:0"]) == DeviceBudget(12 * GB, is_limit=True)
    assert run_budget(None, 23 * GB, ["cuda:0"]) == DeviceBudget(23 * GB, is_limit=True)
    assert run_budget(12 * GB, 12 * GB, ["cuda:0"]) == DeviceBudget(12 * GB, is_limit=True)
    assert not caplog.records


def test_recorded_budget_that_is_not_available(gpus, caplog):
    gpus(cuda_0=23 * GB, cuda_1=10.7 * GB)
    assert run_budget(None, 12 * GB, ["cuda:0", "cuda:1"]) == DeviceBudget(10_500_000_000, is_limit=False)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "this run was begun with 12 GB of device memory, and 10.5 GB is available on cuda:1 now; "
        + MAY_DIFFER
    )


def test_given_budget_other_than_the_recorded_one(gpus, caplog):
    gpus(cuda_0=23 * GB)
    assert run_budget(8 * GB, 12 * GB, ["cuda:0"]) == DeviceBudget(8 * GB, is_limit=True)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "this run was begun with 12 GB of device memory, and 8 GB was asked for now"
    )


# ---- asking the devices ---------------------------------------------------------------------


def test_several_devices_are_asked_by_another_process(monkeypatch):
    """A CUDA context in this process would stay on each device for the whole run."""
    asked = []

    def in_process(devices: Sequence[str]) -> list[float]:
        asked.append(list(devices))
        return [16.0 * GB] * len(devices)

    def here(device: str) -> float:
        raise AssertionError

    monkeypatch.setattr(device_budget, "_asked_in_process", in_process)
    monkeypatch.setattr(device_budget, "available_memory", here)
    assert run_budget(None, None, ["cuda:0", "cuda:1", "cpu"]).num_bytes == 16 * GB
    assert given_budget("8GB", ["cuda:1", "cuda:1"]) == 8 * GB
    assert asked == [["cuda:0", "cuda:1"], ["cuda:1"]]


def test_another_process_answers():
    assert device_budget._asked_in_process(["cpu", "cpu:0"]) == [math.inf, math.inf]


def test_another_process_reports_errors():
    with pytest.raises(RunError, match=r"^cannot ask cuda:99 for available memory: .+") as raised:
        device_budget._asked_in_process(["cuda:99"])
    assert "\n" not in str(raised.value)


def test_errors_of_a_single_device_are_one_line():
    with pytest.raises(RunError, match=r"^cannot ask cuda:99 for available memory: .+") as raised:
        run_budget(None, None, ["cuda:99"])
    assert "\n" not in str(raised.value)


def test_another_process_that_dies(monkeypatch):
    monkeypatch.setattr(device_budget, "_answer", dying_process)
    with pytest.raises(RunError, match=r"asks cuda:0, cuda:1 for available memory died \(exit code 3\)"):
        device_budget._asked_in_process(["cuda:0", "cuda:1"])


def test_another_process_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(device_budget, "_answer", silent_process)
    monkeypatch.setattr(device_budget, "_ANSWER_LIMIT_S", 0.1)
    with pytest.raises(
        RunError, match=r"cuda:0 did not answer within 0 s when asked for available memory; check"
    ):
        device_budget._asked_in_process(["cuda:0"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_several_workers_on_a_gpu_leave_no_context_here():
    code = """
import torch
from latentry.encode.device_budget import run_budget
if __name__ == "__main__":
    half = run_budget(None, None, ["cuda:0", "cuda:0"]).num_bytes
    assert not torch.cuda.is_initialized()
    whole = run_budget(None, None, ["cuda:0"]).num_bytes
    assert torch.cuda.is_initialized()
    assert 0 < half < whole <= torch.cuda.get_device_properties(0).total_memory
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# ---- a run with a budget --------------------------------------------------------------------


class BudgetedTiny(TinyProcessor):
    """Its latents depend on the budget, as the last bits of a real model's do."""

    seen: list[tuple[float, float | None]] = []  # noqa: RUF012 - emptied for each test
    """The budget of each processor, and the limit under which it was made."""
    limit: float | None = None

    def __init__(self, *arguments: Any, device_memory: float = math.inf, **options: Any) -> None:
        super().__init__(*arguments, device_memory=device_memory, **options)
        self._budget = device_memory
        self.seen.append((device_memory, self.limit))

    def encode_pixels(self, pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        return super().encode_pixels(pixels, seeds) + (
            self._budget / 1e12 if math.isfinite(self._budget) else 0
        )


BUDGETED = Recipe(processor="budgeted", max_pixels=128 * 128)


@contextmanager
def noted_limit(device: str, num_bytes: float) -> Iterator[None]:
    BudgetedTiny.limit = num_bytes
    try:
        yield
    finally:
        BudgetedTiny.limit = None


@pytest.fixture
def as_gpu(monkeypatch) -> Callable[[float], None]:
    """Treat the CPU as a device that has this much memory available, and note what processors are given."""
    monkeypatch.setitem(PROCESSORS, "budgeted", f"{__name__}:BudgetedTiny")
    monkeypatch.setattr(local, "memory_limit", noted_limit)
    monkeypatch.setattr(tasks, "TASK_SIZE", 2)
    monkeypatch.setattr(BudgetedTiny, "seen", [])
    monkeypatch.setattr("latentry.hardware._best_gpus", lambda: [])  # the tests run on GPU machines too

    def available(num_bytes: float) -> None:
        monkeypatch.setattr(device_budget, "_workers_by_device", Counter)
        monkeypatch.setattr(device_budget, "available_memory", lambda device: num_bytes)

    return available


@pytest.fixture
def on_cpu(as_gpu, monkeypatch) -> Callable[[], None]:
    """Treat the CPU as what it is again."""
    counted = device_budget._workers_by_device
    return lambda: monkeypatch.setattr(device_budget, "_workers_by_device", counted)


def recorded(cache: Path) -> int | None:
    return json.loads((cache / "metadata.json").read_text()).get("device_memory")


def interrupted(cache: Path, **options: Any) -> Path:
    """Start a run, and stop it after a few samples. The file of its record is returned."""
    with pytest.raises(KeyboardInterrupt):
        prepare(BUDGETED, output_dir=cache, on_progress=stopped_after(5), **options)
    return cache / ".latentry" / "device_memory.json"


def test_the_default_does_not_limit_torch(photos, tmp_path, as_gpu):
    as_gpu(7.9 * GB)
    result = prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache")
    assert BudgetedTiny.seen == [(7.5 * GB, None)]
    assert result.device_memory == recorded(tmp_path / "cache") == 7_500_000_000
    assert read_metadata(tmp_path / "cache").device_memory == 7_500_000_000
    assert "on cpu with 7.5 GB of memory (" in " ".join(str(result).split())
    assert result.to_dict()["device_memory"] == 7_500_000_000


def test_a_given_budget_limits_torch(photos, tmp_path, as_gpu):
    as_gpu(7.9 * GB)
    result = prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache", device_memory="6GB")
    assert BudgetedTiny.seen == [(6 * GB, 6 * GB)]
    assert BudgetedTiny.limit is None, "the limit ends with the run"
    assert result.device_memory == recorded(tmp_path / "cache") == 6 * GB


def test_a_cpu_has_no_budget_and_no_record(photos, tmp_path, as_gpu):
    result = prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache")
    assert BudgetedTiny.seen == [(math.inf, None)]
    assert result.device_memory is None
    assert "device_memory" not in (tmp_path / "cache" / "metadata.json").read_text()
    assert "of memory" not in str(result)
    with pytest.raises(KeyboardInterrupt):
        prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "half", on_progress=stopped_after(5))
    assert not (tmp_path / "half" / ".latentry" / "device_memory.json").exists()


def test_workers_get_the_budget(photos, tmp_path, as_gpu, monkeypatch):
    as_gpu(16 * GB)
    monkeypatch.setattr(device_budget, "_asked_in_process", device_budget._asked)
    jobs = []
    monkeypatch.setattr(local, "_run_in_processes", lambda job, *_: jobs.append(job))
    run = partial(prepare, BUDGETED, image_dir=photos, output_dir=tmp_path / "cache", devices="cpu,cpu")
    for given in (None, "3GB"):
        with pytest.raises(KeyError):  # nothing is committed
            run(device_memory=given)
    assert [(job.device_memory, job.limit_device_memory) for job in jobs] == [(8 * GB, False), (3 * GB, True)]


@pytest.mark.slow
def test_two_worker_processes_share_a_budget(photos, tmp_path, as_gpu, monkeypatch):
    """The whole path with real processes. The workers are new processes, so the processor is the real one."""
    as_gpu(16 * GB)
    monkeypatch.setattr(device_budget, "_asked_in_process", device_budget._asked)
    recipe = Recipe(max_pixels=128 * 128)
    result = prepare(
        recipe, image_dir=photos, output_dir=tmp_path / "cache", devices="cpu,cpu", device_memory="8GB"
    )
    assert result.num_encoded == 12
    assert recorded(tmp_path / "cache") == 8 * GB
    assert "on cpu, cpu with 8 GB of memory each (" in " ".join(str(result).split())


def test_a_resumed_run_has_the_same_budget_and_makes_the_same_bytes(photos, tmp_path, as_gpu, caplog):
    as_gpu(7.9 * GB)
    prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "undisturbed")
    record = interrupted(tmp_path / "cache", image_dir=photos)
    assert json.loads(record.read_text()) == 7_500_000_000
    as_gpu(20 * GB)
    result = prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache")
    assert result.num_already_done > 0
    assert BudgetedTiny.seen[-1] == (7.5 * GB, 7.5 * GB)
    assert_same_cache(tmp_path / "cache", tmp_path / "undisturbed")
    assert not caplog.records
    prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "other")
    with pytest.raises(AssertionError, match="differs"):
        assert_same_cache(tmp_path / "other", tmp_path / "undisturbed")


def test_a_resumed_run_with_less_memory_warns(photos, tmp_path, as_gpu, caplog):
    as_gpu(7.9 * GB)
    record = interrupted(tmp_path / "cache", image_dir=photos)
    as_gpu(5.2 * GB)
    interrupted(tmp_path / "cache", image_dir=photos)
    assert MAY_DIFFER in caplog.text
    assert json.loads(record.read_text()) == 5 * GB
    result = prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache")
    assert BudgetedTiny.seen[1:] == [(5 * GB, None), (5 * GB, 5 * GB)]
    assert result.device_memory == recorded(tmp_path / "cache") == 5 * GB
    assert len(caplog.records) == 1


def test_a_damaged_record_is_a_one_line_error(photos, tmp_path, as_gpu):
    as_gpu(7.9 * GB)
    interrupted(tmp_path / "cache", image_dir=photos).write_text("{")
    with pytest.raises(
        MetadataError, match=r"device_memory\.json is damaged .*; start over with --overwrite"
    ):
        prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache")


def test_overwriting_discards_the_record(photos, tmp_path, as_gpu, caplog):
    as_gpu(7.9 * GB)
    interrupted(tmp_path / "cache", image_dir=photos)
    as_gpu(20 * GB)
    interrupted(tmp_path / "cache", image_dir=photos, overwrite=True)
    as_gpu(30 * GB)
    prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache", overwrite=True)
    assert [budget for budget, _ in BudgetedTiny.seen] == [7.5 * GB, 20 * GB, 20 * GB]
    assert not caplog.records


def test_a_run_without_work_asks_nothing_and_changes_nothing(photos, tmp_path, as_gpu, monkeypatch):
    as_gpu(7.9 * GB)
    prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache")
    before = (tmp_path / "cache" / "metadata.json").read_bytes()
    monkeypatch.delattr(device_budget, "available_memory")
    result = prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache")
    assert (result.num_encoded, result.device_memory) == (0, None)
    assert (tmp_path / "cache" / "metadata.json").read_bytes() == before


def test_a_run_that_only_publishes_keeps_the_record(photos, tmp_path, as_gpu, monkeypatch):
    """Everything is committed, and the process is killed before it publishes."""
    as_gpu(7.9 * GB)

    def kill(metadata):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("latentry.cache.format.CacheMetadata.to_json", kill)
        with pytest.raises(KeyboardInterrupt):
            prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache")
    as_gpu(20 * GB)
    assert prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache").num_encoded == 0
    assert recorded(tmp_path / "cache") == 7_500_000_000


def test_a_cache_can_be_added_to_with_another_budget(photos, tmp_path, as_gpu, on_cpu, caplog):
    cache = tmp_path / "cache"
    as_gpu(7.9 * GB)
    prepare(BUDGETED, image_dir=photos, output_dir=cache)
    fingerprint = read_metadata(cache).fingerprint
    shutil.copy(photos / "home" / "chelsea.jpg", photos / "second.jpg")
    as_gpu(20 * GB)
    assert prepare(BUDGETED, image_dir=photos, output_dir=cache).num_encoded == 1
    assert recorded(cache) == 20 * GB
    assert not caplog.records, "only a run that is resumed must make the same bytes"
    shutil.copy(photos / "home" / "chelsea.jpg", photos / "third.jpg")
    on_cpu()
    assert prepare(BUDGETED, image_dir=photos, output_dir=cache).num_encoded == 1
    assert recorded(cache) is None
    assert read_metadata(cache).fingerprint == fingerprint


def test_place_of_the_key(photos, tmp_path, as_gpu):
    as_gpu(7.9 * GB)
    prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache")
    keys = list(json.loads((tmp_path / "cache" / "metadata.json").read_text()))
    assert keys[-4:] == ["recipe", "fingerprint", "device_memory", "format_version"]
    convert_cache(tmp_path / "cache", tmp_path / "packed")
    assert recorded(tmp_path / "packed") == 7_500_000_000


def test_decoding_gets_what_is_available(photos, tmp_path, as_gpu, monkeypatch):
    prepare(BUDGETED, image_dir=photos, output_dir=tmp_path / "cache")
    monkeypatch.setattr("latentry.encode.decode_check.available_memory", lambda device: 5e9)
    assert verify_cache(tmp_path / "cache", decode=True, device="cpu").exit_status == 0
    assert BudgetedTiny.seen[1:] == [(5e9, None)]


def test_on_the_command_line(photos, tmp_path, as_gpu, capsys):
    as_gpu(7.9 * GB)
    command = ["image", "--image_dir", photos, "--processor", "budgeted", "--devices", "cpu"]
    status, out, _ = run_main(
        capsys, *command, "--output_dir", tmp_path / "a", "--device_memory", "6.5 GB", "--json"
    )
    assert (status, json.loads(out)["device_memory"]) == (0, 6_500_000_000)
    assert recorded(tmp_path / "a") == 6_500_000_000
    status, out, err = run_main(
        capsys, *command, "--output_dir", tmp_path / "b", "--device-memory", "8GB", "--dry_run"
    )
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == (
        "latentry: --device-memory is 8 GB, but cpu has 7.9 GB available; give at most that, or end other programs on "
        "the device"
    )
    assert not (tmp_path / "b").exists()
