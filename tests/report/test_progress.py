"""Progress: rates that are smoothed, failures that are counted, one bar per device."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from latentry.report import progress
from latentry.report.progress import Rate


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_start_up_does_not_count():
    clock = Clock()
    rate = Rate(clock)
    clock.now_s += 60
    assert rate.update(8) is None
    for done in range(16, 80, 8):
        clock.now_s += 2
        assert rate.update(done) == pytest.approx(4.0)


def test_samples_of_a_batch_are_one_point():
    clock = Clock()
    rate = Rate(clock)
    found = []
    for done in range(1, 1 + 64 * 4):
        if done % 64 == 1:
            clock.now_s += 10
        clock.now_s += 1e-4
        found.append(rate.update(done))
    assert found[63] is None
    assert max(value for value in found if value is not None) < 7
    assert found[-1] == pytest.approx(6.4, rel=0.05)


def test_last_half_minute_counts():
    clock = Clock()
    rate = Rate(clock)
    done = 0
    for _ in range(100):
        clock.now_s += 1
        done += 10
        rate.update(done)
    for _ in range(40):
        clock.now_s += 1
        done += 1
        found = rate.update(done)
    assert found == pytest.approx(1.0)


def test_lines_show_failures_of_each_phase(capsys):
    lines = progress._Lines()
    lines("plan", 1, 2, 1)
    lines("plan", 2, 2, 2)
    lines("encode", 5, 5, 3)
    assert capsys.readouterr().err.splitlines() == ["plan: 2/2, 2 failed", "encode: 5/5, 3 failed"]


def drawn(bars: progress._Bars) -> str:
    file = io.StringIO()
    Console(file=file, width=120).print(bars._bars.get_renderable())
    return file.getvalue()


def test_bars_show_failures_and_remaining_time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "Rate", lambda: Rate(clock))
    bars = progress._Bars()
    for done in (10, 20, 30):
        clock.now_s += 5
        bars("encode", done, 100, 4)
    assert "30/100, 4 failed, 2.0/s, 0:00:35 left" in drawn(bars)


def test_bars_of_several_devices(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "Rate", lambda: Rate(clock))
    bars = progress._Bars()
    for done in (10, 20):
        clock.now_s += 5
        bars("encode", done, 40, 1, {"cuda:0": done - 2, "cuda:1": 2})
    total, first, second = drawn(bars).splitlines()
    assert "20/40, 1 failed, 2.0/s, 0:00:10 left" in total
    assert first.startswith("cuda:0")
    assert first.rstrip().endswith("18, 2.0/s")
    assert second.rstrip().endswith("2, 0.0/s")
