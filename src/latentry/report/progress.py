"""Progress on standard error: live bars in a terminal, one line every ten seconds in a log.

The bars need rich, which is part of ``latentry[encode]``. Commands that run without it print lines instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

_LINE_INTERVAL_S = 10.0


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


def _per_second(num_done: int, since: float) -> float:
    return num_done / max(time.monotonic() - since, 1e-9)


class _Lines:
    """Prints a line every ten seconds, and one when a phase ends."""

    def __init__(self) -> None:
        self._started_at = self._printed_at = time.monotonic()

    def __call__(
        self,
        phase: str,
        num_done: int,
        num_total: int,
        num_failed: int = 0,
        num_by_device: Mapping[str, int] | None = None,
    ) -> None:
        now = time.monotonic()
        if num_done < num_total and (phase == "plan" or now - self._printed_at < _LINE_INTERVAL_S):
            return
        self._printed_at = now
        rate = _per_second(num_done, self._started_at)
        print(
            f"{phase}: {num_done}/{num_total}, {num_failed} failed, {rate:.1f}/s", file=sys.stderr, flush=True
        )


class _Bars:
    """Draws a bar for each phase with its rate, and one for each device if there are several."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._started: dict[str, tuple[Any, float]] = {}
        """Bar and start time, by the name of a phase or device."""

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
        self._update(phase, num_done, num_total, num_failed)
        if num_by_device and len(num_by_device) > 1:
            for device, count in num_by_device.items():
                self._update(device, count, num_total, 0)

    def _update(self, name: str, num_done: int, num_total: int, num_failed: int) -> None:
        if name not in self._started:
            self._started[name] = (self._bars.add_task(name, total=num_total, note=""), time.monotonic())
        bar, started_at = self._started[name]
        note = f"{_per_second(num_done, started_at):.1f}/s" + (f", {num_failed} failed" if num_failed else "")
        self._bars.update(bar, completed=num_done, note=note)
