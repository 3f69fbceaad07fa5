"""The tables of a result, drawn with rich. Import this module only to show a result."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from latentry.byte_sizes import in_gb
from latentry.counted import counted
from latentry.report.summary import PrepareResult
from latentry.types import Bucket, Failure

_NUM_WORST_SHOWN = 5
_NUM_FAILURES_SHOWN = 10
_TEXT_WIDTH = 100


def render(result: PrepareResult) -> RenderableType:
    """The buckets, the totals, where captions were found, and the failures of a run."""
    parts: list[RenderableType] = [_bucket_table(result), Text(_totals(result))]
    parts += [Text(f"warning: {text}") for text in result.warnings]
    parts += [Text(text) for text in result.unknown]
    parts += [Text(f"{counted(count, 'input')}: {note}") for note, count in result.notes.items()]
    if result.ignored:
        counts = ", ".join(f"{count} {ending}" for ending, count in result.ignored.items())
        parts.append(Text(f"not taken, by ending: {counts}"))
    if result.captions:
        counts = ", ".join(
            f"{count} left empty" if source == "empty" else f"{count} from {source}"
            for source, count in result.captions.items()
        )
        parts.append(Text(f"captions: {counts}"))
    if result.caption_problems:
        parts += _caption_problems(result.caption_problems)
    if result.psnr_db:
        worst = sorted(result.psnr_db.items(), key=lambda item: item[1][1])[:_NUM_WORST_SHOWN]
        shown_db = ", ".join(f"{name} {value:.1f} dB" for name, (_, value) in worst)
        parts.append(Text(f"lowest PSNR: {shown_db}"))
    if result.left_out:
        parts.append(_reason_table(result.left_out, "left out by your rules"))
    if result.failures:
        title = "failures" if result.dry_run else "failures (failures.jsonl lists all of them)"
        parts.append(_reason_table(result.failures, title))
    return Group(*parts)


def _caption_problems(problems: Mapping[str, str]) -> list[Text]:
    """One line for each kind of problem, with the first file that has it."""
    files: dict[str, list[str]] = {}
    for file, problem in problems.items():
        files.setdefault(problem, []).append(file)
    lines = [f"{counted(len(problems), 'caption problem')}:"]
    for problem, found in list(files.items())[:_NUM_FAILURES_SHOWN]:
        like_it = f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""
        lines.append(f"  {found[0]} {problem}{like_it}")
    hidden = sum(len(found) for found in list(files.values())[_NUM_FAILURES_SHOWN:])
    if hidden:
        lines.append(f"  and {hidden} more")
    return [Text(line) for line in lines]


def to_text(result: PrepareResult) -> str:
    """The same as plain text, 100 characters wide."""
    file = io.StringIO()
    Console(file=file, width=_TEXT_WIDTH).print(render(result))
    return file.getvalue().rstrip()


def _bucket_table(result: PrepareResult) -> Table:
    columns = [
        ("bucket", [bucket.name for bucket in result.buckets]),
        ("samples", [str(count) for count in result.buckets.values()]),
    ]
    if result.items and dict(result.items) != dict(result.buckets):
        columns.append(("with repeats", [str(result.items[bucket]) for bucket in result.buckets]))
    changes = [result.size_changes.get(bucket) for bucket in result.buckets]
    if result.size_changes:
        columns.append(
            ("mean upscaling", [f"{change.upscale:.2f}x" if change else "-" for change in changes])
        )
        columns.append(("mean cropped", [f"{change.crop:.1%}" if change else "-" for change in changes]))
    if any(change is not None and change.stretch > 1 for change in changes):
        columns.append(("mean stretch", [f"{change.stretch:.2f}x" if change else "-" for change in changes]))
    if result.psnr_db:
        psnr_by_bucket: dict[Bucket, list[float]] = {}
        for bucket, value in result.psnr_db.values():
            psnr_by_bucket.setdefault(bucket, []).append(value)
        means = {bucket: sum(values) / len(values) for bucket, values in psnr_by_bucket.items()}
        columns.append(("mean PSNR", [f"{means[b]:.1f} dB" if b in means else "-" for b in result.buckets]))
    table = Table(title="plan" if result.dry_run else "cache", title_justify="left")
    for number, (header, _) in enumerate(columns):
        table.add_column(header, justify="right" if number else "left")
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    return table


def _totals(result: PrepareResult) -> str:
    verb = "would be encoded" if result.dry_run else "encoded"
    some = f" ({result.num_captions_only} of them only their captions)" if result.num_captions_only else ""
    parts = [
        f"{result.num_encoded} {verb}{some}",
        f"{result.num_already_done} already done",
        f"{len(result.failures)} failed",
    ]
    if result.left_out:
        parts.append(f"{len(result.left_out)} left out")
    if result.num_removed:
        parts.append(f"{result.num_removed} removed (input deleted, or left out by your rules)")
    if result.num_kept:
        parts.append(f"{result.num_kept} kept (not among this run's inputs)")
    text = ", ".join(parts)
    if not result.dry_run:
        text += f"; {result.duration_s:.1f} s on {', '.join(result.devices)}"
        if result.device_memory is not None:
            text += f" with {in_gb(result.device_memory)} of memory"
            text += " each" if len(result.devices) > 1 else ""
        text += f" ({result.samples_per_s:.1f} samples/s)"
        text += f"; {result.size_bytes / 1e6:.1f} MB in {result.output_dir}"
    return text


def _reason_table(failures: Sequence[Failure], title: str) -> Table:
    reasons = Counter(failure.reason for failure in failures)
    examples = {failure.reason: failure.name for failure in reversed(failures)}
    table = Table(title=title, title_justify="left")
    table.add_column("count", justify="right")
    table.add_column("reason")
    table.add_column("example")
    for reason, count in reasons.most_common(_NUM_FAILURES_SHOWN):
        table.add_row(str(count), Text(reason), Text(examples[reason]))
    if len(reasons) > _NUM_FAILURES_SHOWN:
        table.add_row("…", f"and {counted(len(reasons) - _NUM_FAILURES_SHOWN, 'more reason')}", "")
    return table
