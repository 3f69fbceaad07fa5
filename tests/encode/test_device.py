"""Settings of the process that a run changes, and copies to main memory."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from latentry.encode.running.device import copy_to_host, gpu_feeding_priority, to_host


def settings() -> tuple[int, float]:
    return torch.get_num_threads(), sys.getswitchinterval()


@pytest.fixture
def before() -> Iterator[tuple[int, float]]:
    """The settings before a test, of which torch's threads are not one. They must be the same after it."""
    torch.set_num_threads(2)
    found = settings()
    assert found[1] > 1e-3
    yield found
    assert settings() == found


def feeding() -> Iterator[int]:
    """A run, as far as its settings are concerned."""
    with gpu_feeding_priority():
        yield from range(10)


def test_settings_change_inside_only(before):
    with gpu_feeding_priority():
        assert settings() == (1, pytest.approx(1e-4))
    assert settings() == before


def test_settings_are_restored_after_an_exception(before):
    with pytest.raises(KeyboardInterrupt), gpu_feeding_priority():
        raise KeyboardInterrupt
    assert settings() == before


def test_settings_are_restored_when_a_generator_is_closed(before):
    run = feeding()
    next(run)
    assert settings() != before
    run.close()
    assert settings() == before


def test_settings_are_restored_when_a_generator_is_abandoned(before):
    run = feeding()
    next(run)
    assert settings() != before
    del run
    gc.collect()
    assert settings() == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_settings_are_restored_in_whatever_order_runs_end(order, before):
    runs = [feeding(), feeding()]
    for run in runs:
        next(run)
    runs[order[0]].close()
    assert sys.getswitchinterval() == pytest.approx(1e-4), "one run is still feeding a GPU"
    runs[order[1]].close()
    assert settings() == before


def test_settings_of_runs_in_two_threads(before):
    entered, leave = threading.Barrier(2), threading.Event()
    seen = []

    def other() -> None:
        with gpu_feeding_priority():
            entered.wait(timeout=60)
            leave.wait(timeout=60)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    with gpu_feeding_priority():
        thread.start()
        entered.wait(timeout=60)
    assert sys.getswitchinterval() == pytest.approx(1e-4), "the other thread is still feeding a GPU"
    leave.set()
    thread.join()
    assert seen == [before[0]]


def test_copies_to_main_memory():
    tensor = torch.ones(3)
    assert to_host(tensor) is tensor
    copy = copy_to_host(tensor)
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr()
