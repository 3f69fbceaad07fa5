"""From a recipe and a list of files to a plan: what happens to every input, before any pixel is decoded.

Planning looks up all captions. An input that the cache already holds unchanged is done. If only its captions have
changed, the rest is taken from the cache. Of the others, the headers are read. An input that cannot be read is a
failure with its reason. The rest is cut into tasks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from latentry.cache.format import TASK_SIZE, Row
from latentry.cache.write.commits import Checkpoint
from latentry.encode.planning.headers import BucketChooser, read_headers
from latentry.encode.planning.held_samples import has_captions, is_same_media, planned_sample
from latentry.encode.planning.repeats import Repeats
from latentry.encode.planning.sizes import SizeRules, SizeSummary
from latentry.encode.planning.tasks import bucket_rank, continue_tasks, cut_into_tasks, without_damage
from latentry.media.reader import MediaReader
from latentry.sources.caption_folders import CaptionFolders
from latentry.sources.captions import NO_CAPTION
from latentry.sources.folder import SourceFolders
from latentry.types import Bucket, Caption, Failure, PlannedSample, SizeChange, SourceFile, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The tasks to run, and what happens to every input that needs no work."""

    tasks: tuple[Task, ...]
    done: Mapping[str, Row]
    """Sample name to row, for samples that the cache holds unchanged."""
    skipped: tuple[Failure, ...]
    """Inputs whose headers already show that they cannot be encoded."""
    unsuitable: frozenset[str] = frozenset()
    """The names of those among them that are whole, but that the options leave out."""
    vanished: tuple[str, ...]
    """Samples of the cache whose input no longer exists."""
    dropped: tuple[str, ...] = ()
    """Samples of the cache whose input is left out now. They are removed from the cache."""
    kept: Mapping[str, Row] = field(default_factory=dict)
    """Samples of the cache whose input exists but is not part of this run, by name. They stay in the cache."""
    left_out: tuple[Failure, ...] = ()
    """Inputs that the user's own rules leave out, such as a size limit. They are not failures."""
    notes: Counter[str] = field(default_factory=Counter)
    """What the headers say about how inputs are read, with the number of inputs for each text."""
    size_changes: Mapping[Bucket, SizeChange] = field(default_factory=dict)
    """The mean change of the samples of each bucket, where their original size is known."""
    warnings: tuple[str, ...] = ()
    """What the user should look at before training."""
    captions: Counter[str] = field(default_factory=Counter)
    caption_problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_to_encode(self) -> int:
        return sum(len(task.samples) - task.num_finished for task in self.tasks)

    @property
    def captions_only(self) -> frozenset[str]:
        """The names of the samples of which only the captions are encoded."""
        return frozenset(
            sample.name
            for task in self.tasks
            if task.captions_only
            for sample in task.samples[task.num_finished :]
        )

    def buckets(self, repeats: Repeats | None = None) -> dict[Bucket, int]:
        """Samples per bucket after the run, smallest bucket first; with ``repeats``, as often as an epoch has them."""
        counts: Counter[Bucket] = Counter()
        for task in self.tasks:
            for sample in task.samples[task.num_finished :]:
                counts[task.bucket] += repeats.number(sample.file.name) if repeats else 1
        for row in (*self.done.values(), *self.kept.values()):
            counts[row.bucket] += repeats.number(row.source_name, row.repeat + 1) if repeats else 1
        return _sorted_buckets(counts)


def count_buckets(rows: Iterable[Row]) -> dict[Bucket, int]:
    """Rows per bucket, smallest bucket first."""
    return _sorted_buckets(Counter(row.bucket for row in rows))


def _sorted_buckets(counts: Mapping[Bucket, int]) -> dict[Bucket, int]:
    return dict(sorted(counts.items(), key=lambda item: bucket_rank(item[0])))


def make_plan(
    files: Sequence[SourceFile],
    source: SourceFolders,
    reader: MediaReader,
    choose_buckets: BucketChooser,
    finder: CaptionFolders,
    *,
    known: Mapping[str, Row],
    checkpoints: Sequence[Checkpoint] = (),
    sizes: SizeRules = SizeRules(),  # noqa: B008 - frozen
    task_size: Callable[[Bucket], int] = lambda _: TASK_SIZE,
    unreadable: Sequence[Failure] = (),
    failed_before: Iterable[str] = (),
    keep_damaged: bool = False,
    on_progress: Callable[[int, int, int], None] = lambda *_: None,
) -> Plan:
    """Decide what happens to every file. ``known`` are the cache's rows by sample name.

    ``on_progress`` gets the number of files that are planned, of all files, and of those that failed.
    """
    names = {file.name for file in files}
    all_rows = {row.sample_name: row for checkpoint in checkpoints for row in checkpoint.rows} | dict(known)
    elsewhere = {name: row for name, row in all_rows.items() if row.source_name not in names}
    kept = {name: row for name, row in elsewhere.items() if source.path(row.source_name).exists()}
    if not keep_damaged:
        known = {name: row for name, row in known.items() if not row.damage}
        checkpoints = [without_damage(checkpoint) for checkpoint in checkpoints]
    inputs = _Inputs(source, known, sizes, failed=list(unreadable))
    for file in files:
        inputs.add_file(file, finder)
    finder.note_problems_of_lists()
    num_files, num_failed = len(files) + len(unreadable), len(inputs.failed)
    num_before = num_files - len(inputs.unread)
    on_progress(num_before, num_files, num_failed)
    headers = read_headers(
        inputs.unread,
        source,
        reader,
        choose_buckets,
        lambda count, failed: on_progress(num_before + count, num_files, num_failed + failed),
    )
    inputs.failed += headers.failures
    for sample in headers.samples:
        inputs.add_sample(sample)
    cut = cut_into_tasks(inputs.to_encode, frozenset(failed_before), task_size)
    tasks, stored = continue_tasks(cut, checkpoints, source, task_size)
    done = inputs.done | stored
    left_out = {failure.name for failure in inputs.left_out}
    summary = SizeSummary(sizes)
    for task in tasks:
        for sample in task.samples[task.num_finished :]:
            summary.add(sample.file.name, (sample.width, sample.height), sample.bucket)
    for row in done.values():
        if row.original_resolution is not None:
            summary.add(row.source_name, row.original_resolution, row.bucket)
    return Plan(
        tasks=tuple(tasks),
        done=done,
        skipped=tuple(inputs.failed),
        unsuitable=headers.unsuitable,
        vanished=tuple(name for name in elsewhere if name not in kept),
        dropped=tuple(name for name, row in known.items() if row.source_name in left_out),
        kept=kept | inputs.kept,
        left_out=tuple(sorted(inputs.left_out, key=lambda failure: failure.name)),
        size_changes=summary.means(),
        warnings=summary.warnings(),
        notes=headers.notes,
        captions=finder.counts,
        caption_problems=finder.problems,
    )


@dataclass
class _Inputs:
    """The inputs of a run, sorted by what happens to them."""

    source: SourceFolders
    known: Mapping[str, Row]
    """The cache's rows by sample name."""
    sizes: SizeRules
    failed: list[Failure]
    left_out: list[Failure] = field(default_factory=list)
    kept: dict[str, Row] = field(default_factory=dict)
    """Rows of files that have lost their captions. They stay in the cache."""
    done: dict[str, Row] = field(default_factory=dict)
    to_encode: list[PlannedSample] = field(default_factory=list)
    unread: list[tuple[SourceFile, Caption]] = field(default_factory=list)
    """New and changed files, whose headers must be read."""

    @cached_property
    def _known_of_file(self) -> Mapping[str, list[str]]:
        names: dict[str, list[str]] = defaultdict(list)
        for name, row in self.known.items():
            names[row.source_name].append(name)
        return names

    def add_file(self, file: SourceFile, finder: CaptionFolders) -> None:
        """Sort a file, by its name, its caption and what the cache holds of it."""
        if not _is_unicode(file.name):
            name = ascii(file.name)[1:-1]
            self.failed.append(Failure(name, "has a name that is not valid UTF-8; rename it"))
            return
        caption = finder.find(file.name)
        if caption is None:
            (self.failed if finder.required else self.left_out).append(Failure(file.name, NO_CAPTION))
            if finder.required:  # nothing is wrong with what the cache has of it
                self.kept |= {name: self.known[name] for name in self._known_of_file.get(file.name, ())}
            return
        rows = {name: self.known[name] for name in self._known_of_file.get(file.name, ())}
        if not rows or not all(is_same_media(row, len(rows), file, self.source) for row in rows.values()):
            self.unread.append((file, caption))
        elif broken := _rule_broken_by(rows.values(), self.sizes):
            self.left_out.append(Failure(file.name, broken))
        else:
            for name, row in rows.items():
                if has_captions(row, caption):
                    self.done[name] = row
                else:
                    self.to_encode.append(planned_sample(row, file, caption, stored_row=row.to_dict()))

    def add_sample(self, sample: PlannedSample) -> None:
        """Sort a sample of a file whose header was read. Of a file that gives several samples, some may be done."""
        held = self.known.get(sample.name)
        if broken := self.sizes.broken_by((sample.width, sample.height), sample.bucket):
            if sample.number == 0:
                self.left_out.append(Failure(sample.file.name, broken))
        elif held is None or not is_same_media(held, None, sample.file, self.source):
            self.to_encode.append(sample)
        elif has_captions(held, sample.caption):
            self.done[sample.name] = held
        else:
            self.to_encode.append(replace(sample, stored_row=held.to_dict()))


def _is_unicode(name: str) -> bool:
    """Whether the name can be written as text: file systems allow bytes that are not valid UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _rule_broken_by(rows: Iterable[Row], sizes: SizeRules) -> str | None:
    """Why an input that the cache holds is left out of this run; None if it is not."""
    for row in rows:
        if row.original_resolution is not None and (
            broken := sizes.broken_by(row.original_resolution, row.bucket)
        ):
            return broken
    return None
