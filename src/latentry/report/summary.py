"""The result of a run: an object for programs, a table for terminals and notebooks, JSON for scripts.

The record itself imports nothing heavy. ``tables.py`` draws it with rich when somebody prints it.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentry.types import Bucket, Failure, SizeChange

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, kw_only=True)
class PrepareResult:
    """What ``prepare()`` did. Printing it shows a table; a notebook shows the same."""

    output_dir: Path
    """The folder of the cache."""
    dry_run: bool
    """Whether this is a plan only, and nothing was written."""
    num_encoded: int
    """Samples that this run encoded; with ``dry_run``, that it would encode."""
    num_captions_only: int = 0
    """How many of them were in the cache except for their captions, so that only these were encoded."""
    num_already_done: int
    """Samples that the cache held already, unchanged."""
    num_removed: int
    """Samples that were removed from the cache because their input was deleted."""
    failures: tuple[Failure, ...]
    """Inputs that could not be encoded, with the reason for each."""
    buckets: Mapping[Bucket, int]
    """Samples per bucket in the finished cache."""
    captions: Mapping[str, int]
    """Captions per place where they were found, such as ``txt`` or ``jsonl``."""
    caption_problems: Mapping[str, str]
    """Caption files that could not be used: name to reason."""
    devices: tuple[str, ...]
    """The devices that encoded."""
    device_memory: int | None = None
    """The bytes of each device's memory that each worker could use. None on a CPU, if nothing was encoded, and in a plan
    for which it was not given."""
    duration_s: float
    """Wall-clock time of the whole run, planning included."""
    size_bytes: int
    """The size of the cache on disk; 0 with ``dry_run``."""
    num_kept: int = 0
    """Samples that stay in the cache although this run does not take their input: it is in another folder, beyond
    ``max_files``, or has lost its caption while ``caption_required`` is set."""
    items: Mapping[Bucket, int] = field(default_factory=dict)
    """Items per bucket in an epoch of the finished cache: samples, as often as they are repeated."""
    size_changes: Mapping[Bucket, SizeChange] = field(default_factory=dict)
    """The mean upscaling, cropping and stretching of the samples of each bucket, where their original size is known."""
    warnings: tuple[str, ...] = ()
    """What to look at before training, such as inputs that are scaled up by more than 2x."""
    left_out: tuple[Failure, ...] = ()
    """Inputs that the user's own rules left out, such as a size limit, with the rule for each. They are not
    failures."""
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Files of the input folders that were not taken, by ending, such as ``.heic``; ``(none)`` for files without an
    ending, and ``(hidden)`` for hidden files and folders."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """What the user should know about how inputs were read, with the number of inputs for each text."""
    unknown: tuple[str, ...] = ()
    """With ``dry_run``: what the plan could not find out."""
    psnr_db: Mapping[str, tuple[Bucket, float]] = field(default_factory=dict)
    """With ``verify``: sample name to its bucket and PSNR in decibels, for what this run encoded."""

    @property
    def exit_status(self) -> int:
        """0 if every input is in the cache, except those that were left out by rule; 2 if some failed."""
        return 2 if self.failures else 0

    @property
    def samples_per_s(self) -> float:
        """Encoded samples per second of the whole run."""
        return self.num_encoded / self.duration_s if self.duration_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "output_dir": str(self.output_dir),
            "dry_run": self.dry_run,
            "encoded": self.num_encoded,
            "captions_only": self.num_captions_only,
            "already_done": self.num_already_done,
            "removed": self.num_removed,
            "failed": len(self.failures),
            "failures": [{"name": failure.name, "reason": failure.reason} for failure in self.failures],
            "kept": self.num_kept,
            "items": {bucket.name: count for bucket, count in self.items.items()},
            "size_changes": {bucket.name: asdict(change) for bucket, change in self.size_changes.items()},
            "warnings": list(self.warnings),
            "left_out": [{"name": failure.name, "reason": failure.reason} for failure in self.left_out],
            "ignored": dict(self.ignored),
            "notes": dict(self.notes),
            "unknown": list(self.unknown),
            "buckets": {bucket.name: count for bucket, count in self.buckets.items()},
            "captions": dict(self.captions),
            "caption_problems": dict(self.caption_problems),
            "devices": list(self.devices),
            "device_memory": self.device_memory,
            "duration_s": round(self.duration_s, 3),
            "samples_per_s": round(self.samples_per_s, 3),
            "size_bytes": self.size_bytes,
            "psnr_db": {name: round(value, 2) for name, (_, value) in self.psnr_db.items()},
            "exit_status": self.exit_status,
        }

    def __rich__(self) -> RenderableType:
        from latentry.report.tables import render

        return render(self)

    def __str__(self) -> str:
        from latentry.report.tables import to_text

        return to_text(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
