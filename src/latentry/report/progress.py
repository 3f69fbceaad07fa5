"""Progress on standard error: live bars in a terminal, one line every ten seconds in a log.

The bars need rich, which is part of ``latentry[encode]``. Commands that run without it print lines instead.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Protocol

_LINE_INTERVAL_S = 10.0
_RATE_WINDOW_S = 30.0
_MIN_GAP_S = 0.2


class ProgressDisplay(Protocol):
    """Shows how far a phase of a command is. Call it after each sample."""

    def __call__(
        self,
        phase: str,
        num_done: int,
        num_total: int,
        num_failed: int = 0,
        num_by_device: Mapping[str, int] | None = None,
    ) -> None: ...


@contextmanager
def progress_display(*, quiet: bool) -> Iterator[ProgressDisplay]:
    """The display that suits standard error.

    >>> with progress_display(quiet=False) as show:
    ...     show("encode", 3, 12)
    """
    if quiet:
        yield _show_nothing
    elif sys.stderr.isatty() and find_spec("rich") is not None:
        with _Bars() as bars:
            yield bars
    else:
        yield _Lines()


def _show_nothing(
    phase: str,
    num_done: int,
    num_total: int,
    num_failed: int = 0,
    num_by_device: Mapping[str, int] | None = None,
) -> None:
    """The display of a quiet command."""


class Rate:
    """Samples per second over the last half minute. The time before the first sample, start-up, does not count.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._points: deque[tuple[float, int]] = deque()

    def update(self, num_done: int) -> float | None:
        """The rate when this number of samples is done; None until it is known."""
        now_s = self._clock()
        # The samples of a batch are reported in one instant, which is one point.
        if self._points and now_s - self._points[-1][0] < _MIN_GAP_S:
            self._points[-1] = (self._points[-1][0], num_done)
        else:
            self._points.append((now_s, num_done))
        while len(self._points) > 2 and now_s - self._points[1][0] >= _RATE_WINDOW_S:
            self._points.popleft()
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


class _Lines:
    """Prints a line every ten seconds, and one when a phase ends."""

    def __init__(self) -> None:
        self._printed_at = time.monotonic()
        self._rates: defaultdict[str, Rate] = defaultdict(Rate)

    def __call__(
        self,
        phase: str,
        num_done: int,
        num_total: int,
        num_failed: int = 0,
        num_by_device: Mapping[str, int] | None = None,
    ) -> None:
        rate = self._rates[phase].update(num_done)
        now = time.monotonic()
        if num_done < num_total and (phase == "plan" or now - self._printed_at < _LINE_INTERVAL_S):
            return
        self._printed_at = now
        print(
            f"{phase}: {num_done}/{num_total}, {_note(num_failed, rate)}",
            file=sys.stderr,
            flush=True,
        )


class _Bars:
    """Draws a bar for each phase with its failures, rate and remaining time, and one for each of several devices."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, Any] = {}
        """Bar by the name of a phase or device."""
        self._rates: defaultdict[str, Rate] = defaultdict(Rate)

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(
        self,
        phase: str,
        num_done: int,
        num_total: int,
        num_failed: int = 0,
        num_by_device: Mapping[str, int] | None = None,
    ) -> None:
        rate = self._rates[phase].update(num_done)
        note = f"{num_done}/{num_total}, {_note(num_failed, rate)}"
        if rate and num_done < num_total:
            note += f", {timedelta(seconds=round((num_total - num_done) / rate))} left"
        self._update(phase, num_done, num_total, note)
        if num_by_device and len(num_by_device) > 1:
            for device, count in num_by_device.items():
                device_rate = self._rates[device].update(count)
                shown = str(count) if device_rate is None else f"{count}, {device_rate:.1f}/s"
                self._update(device, count, num_total, shown)

    def _update(self, name: str, num_done: int, num_total: int, note: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=num_total, note="")
        self._bars.update(self._tasks[name], completed=num_done, note=note)


def _note(num_failed: int, rate: float | None) -> str:
    return f"{num_failed} failed" + ("" if rate is None else f", {rate:.1f}/s")
