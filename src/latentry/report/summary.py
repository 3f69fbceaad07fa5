"""The outcome of a run: an object for programs, a table for terminals and notebooks, JSON for scripts."""

from __future__ import annotations

import html
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from latentry.types import Bucket, Failure, bucket_name

_WORST = 5
_FAILURES_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class PrepareResult:
    """What a run did; ``str()`` is its table, a notebook shows it as one."""

    output_dir: Path
    dry_run: bool
    num_encoded: int
    """With ``dry_run``, how many would be."""
    num_already_done: int
    num_removed: int
    """Samples of the cache whose source is gone."""
    failures: tuple[Failure, ...]
    buckets: Mapping[Bucket, int]
    captions: Mapping[str, int]
    caption_problems: Mapping[str, str]
    devices: tuple[str, ...]
    duration_s: float
    size_bytes: int
    psnr_db: Mapping[str, tuple[Bucket, float]] = field(default_factory=dict)
    """With ``verify``: name to bucket and decibels, for what this run encoded."""

    @property
    def exit_status(self) -> int:
        """0 if every input is in the cache, 2 if some failed."""
        return 2 if self.failures else 0

    @property
    def samples_per_s(self) -> float:
        return self.num_encoded / self.duration_s if self.duration_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "output_dir": str(self.output_dir),
            "dry_run": self.dry_run,
            "encoded": self.num_encoded,
            "already_done": self.num_already_done,
            "removed": self.num_removed,
            "failed": len(self.failures),
            "failures": [{"name": failure.name, "reason": failure.reason} for failure in self.failures],
            "buckets": {bucket_name(bucket): count for bucket, count in self.buckets.items()},
            "captions": dict(self.captions),
            "caption_problems": dict(self.caption_problems),
            "devices": list(self.devices),
            "duration_s": round(self.duration_s, 3),
            "samples_per_s": round(self.samples_per_s, 3),
            "size_bytes": self.size_bytes,
            "psnr_db": {name: round(value, 2) for name, (_, value) in self.psnr_db.items()},
            "exit_status": self.exit_status,
        }

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [_bucket_table(self), Text(_sentence(self))]
        if self.captions:
            parts.append(
                Text("captions: " + ", ".join(f"{n} from {source}" for source, n in self.captions.items()))
            )
        if self.caption_problems:
            shown = list(self.caption_problems.items())[:_FAILURES_SHOWN]
            parts.append(
                Text(f"{len(self.caption_problems)} caption problems, for which the next source was asked:")
            )
            parts += [Text(f"  {where} {problem}") for where, problem in shown]
        if self.psnr_db:
            worst = sorted(self.psnr_db.items(), key=lambda item: item[1][1])[:_WORST]
            parts.append(
                Text("worst restored: " + ", ".join(f"{name} {value:.1f} dB" for name, (_, value) in worst))
            )
        if self.failures:
            parts.append(_failure_table(self))
        return Group(*parts)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100)
        console.print(self)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text.rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _bucket_table(result: PrepareResult) -> Table:
    table = Table(title="plan" if result.dry_run else "cache", title_justify="left")
    table.add_column("bucket")
    table.add_column("samples", justify="right")
    by_bucket: dict[Bucket, list[float]] = {}
    for bucket, value in result.psnr_db.values():
        by_bucket.setdefault(bucket, []).append(value)
    if by_bucket:
        table.add_column("mean PSNR", justify="right")
    for bucket, count in result.buckets.items():
        values = by_bucket.get(bucket, [])
        psnr = [f"{sum(values) / len(values):.1f} dB" if values else "-"] if by_bucket else []
        table.add_row(bucket_name(bucket), str(count), *psnr)
    return table


def _sentence(result: PrepareResult) -> str:
    verb = "would be encoded" if result.dry_run else "encoded"
    parts = [
        f"{result.num_encoded} {verb}",
        f"{result.num_already_done} already done",
        f"{len(result.failures)} failed",
    ]
    if result.num_removed:
        parts.append(f"{result.num_removed} removed (their source is gone)")
    text = ", ".join(parts)
    if not result.dry_run:
        size = f"{result.size_bytes / 1e6:.1f} MB"
        text += f"; {result.duration_s:.1f} s on {', '.join(result.devices)}"
        text += f", {result.samples_per_s:.1f} a second; {size} in {result.output_dir}"
    return text


def _failure_table(result: PrepareResult) -> Table:
    reasons = Counter(failure.reason for failure in result.failures)
    examples = {failure.reason: failure.name for failure in reversed(result.failures)}
    title = "failures" if result.dry_run else "failures (all are named in failures.jsonl)"
    table = Table(title=title, title_justify="left")
    table.add_column("count", justify="right")
    table.add_column("reason")
    table.add_column("for example")
    for reason, count in reasons.most_common(_FAILURES_SHOWN):
        table.add_row(str(count), Text(reason), Text(examples[reason]))
    if len(reasons) > _FAILURES_SHOWN:
        table.add_row("…", f"and {len(reasons) - _FAILURES_SHOWN} more reasons", "")
    return table
