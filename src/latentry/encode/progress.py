"""How far a run is, as its caller is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from latentry.encode.planning.plan import Plan
from latentry.encode.running.pipeline import Outcome
from latentry.types import Bucket, Failure


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    phase: str
    """``plan`` (reading headers) or ``encode``."""
    done: int
    total: int
    failures: int = 0
    by_device: Mapping[str, int] = field(default_factory=dict)


OnProgress = Callable[[Progress], None]


class Watcher:
    """Counts what the engine reports, and passes it on as progress."""

    def __init__(self, plan: Plan, on_progress: OnProgress) -> None:
        self._total = plan.num_to_encode
        self._on_progress = on_progress
        self._buckets = {sample.name: task.bucket for task in plan.tasks for sample in task.samples}
        self.failures: list[Failure] = []
        self.by_device: dict[str, int] = {}
        self.psnr_db: dict[str, tuple[Bucket, float]] = {}

    def __call__(self, device: str, report: Outcome) -> None:
        self.by_device[device] = self.by_device.get(device, 0) + 1
        if report.failure is not None:
            self.failures.append(Failure(report.name, report.failure))
        if report.psnr_db is not None:
            self.psnr_db[report.name] = (self._buckets[report.name], report.psnr_db)
        done = sum(self.by_device.values())
        self._on_progress(Progress("encode", done, self._total, len(self.failures), dict(self.by_device)))
