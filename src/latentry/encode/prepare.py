"""From a folder of pictures or clips to a cache: the one function behind the command and the notebook.

Plan, tasks, index. Stop it anywhere; the same call goes on from what is committed, and the finished cache
is the one an undisturbed run makes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from latentry.cache.format import PACKED
from latentry.cache.packed.index import Entry
from latentry.cache.read.samples import OpenShards
from latentry.cache.write.workspace import Workspace, cache_file_of
from latentry.encode.pipeline import Outcome
from latentry.encode.plan import Plan, count_buckets, make_plan, task_size_of
from latentry.encode.recipe import Recipe, ResolvedRecipe, bucket_chooser
from latentry.engines.local import Job, find_devices, run_tasks
from latentry.errors import CacheError, ConfigError, RunError
from latentry.processors import Processor, processor_class
from latentry.report.summary import PrepareResult
from latentry.sources.captions import CaptionFinder
from latentry.sources.folder import list_folder
from latentry.storage import content_digest
from latentry.types import Bucket, Commit, Failure


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is, for whoever shows it."""

    phase: str
    """``plan`` (reading headers) or ``encode``."""
    done: int
    total: int
    failures: int = 0
    by_device: Mapping[str, int] = field(default_factory=dict)


def prepare(
    recipe: Recipe,
    *,
    image_dir: str | os.PathLike[str] | None = None,
    video_dir: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str],
    devices: str = "auto",
    batch_size: int | None = None,
    shard_size: int = 10_000,
    max_files: int | None = None,
    verify: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> PrepareResult:
    """Encode a folder of pictures, or of clips if the recipe has ``video``, into a cache.

    >>> result = prepare(Recipe(processor="flux", max_pixels=512 * 512), image_dir="photos", output_dir="cache")
    >>> result.num_encoded, result.failures

    ``max_files`` takes only the first so many inputs, by name. ``verify`` decodes every latent again and
    measures it, ``overwrite`` replaces a cache made by another recipe, ``dry_run`` stops after the plan and
    writes nothing.
    """
    for name, value in (("batch_size", batch_size), ("shard_size", shard_size), ("max_files", max_files)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    started = time.monotonic()
    family = processor_class(recipe.processor)
    media = "image" if recipe.video is None else "video"
    if media not in family.info.media:
        raise ConfigError(
            f"the processor {recipe.processor!r} encodes {' and '.join(family.info.media)}s, not {media}s"
        )
    folder = image_dir if media == "image" else video_dir
    if folder is None or (image_dir is not None and video_dir is not None):
        raise ConfigError(
            f"a recipe for {media}s takes {media}_dir, the folder that holds them, and no other"
        )
    source, output = (Path(path).expanduser().absolute() for path in (folder, output_dir))
    device_names = find_devices(devices)
    model_name = recipe.model_name or family.info.default_model_name
    resolved = _resolve(recipe, family, model_name, device_names)
    choose_buckets, medium = bucket_chooser(resolved), resolved.media_reader()
    files, unreadable = list_folder(source, medium.suffixes, leave_out=output)
    files = files[:max_files]
    lines_field = "internvl" if media == "image" else "caption"
    finder = CaptionFinder(source, recipe.caption_format, recipe.caption_field, lines_field)

    def plan_for(workspace: Workspace, known: Mapping[str, Mapping[str, Any]]) -> Plan:
        plan = make_plan(
            files,
            source,
            medium,
            choose_buckets,
            finder,
            known=known,
            task_size=task_size_of(resolved, family.info),
            unreadable=unreadable,
            failed_before=workspace.failed_before(),
            on_progress=lambda done: on_progress(Progress("plan", done, len(files))),
        )
        if plan.vanished and not plan.done:
            raise RunError(
                f"none of the {len(plan.vanished)} samples in {output} comes from {source}; choose another "
                "output_dir, or replace that cache with --overwrite"
            )
        return plan

    if dry_run:
        workspace = Workspace(output)
        if not overwrite:
            _check_recipe(workspace, resolved)
        plan = plan_for(workspace, {} if overwrite else workspace.rows(resolved.fingerprint))
        return _result(plan, output, device_names, started, plan.buckets(), dry_run=True)

    with Workspace.opened(output) as workspace:
        if not overwrite:
            _check_recipe(workspace, resolved)
        workspace.begin(asdict(resolved), overwrite=overwrite)
        known = workspace.rows(resolved.fingerprint)
        if verify:
            shards = OpenShards(output)
            known = {name: row for name, row in known.items() if _intact(row, output, shards)}
        plan = plan_for(workspace, known)
        watcher = _Watcher(plan, on_progress)
        job = Job(
            recipe=resolved,
            model_name=model_name,
            source=source,
            output=output,
            batch_size=batch_size,
            verify=verify,
        )
        run_tasks(job, plan.tasks, device_names, watcher)
        encoded = {row["sample_name"]: row for row in workspace.committed(task.id for task in plan.tasks)}
        rows = _rows_to_keep(plan, known, encoded, source, output)
        failures = sorted([*plan.skipped, *watcher.failures], key=lambda failure: failure.name)
        header = {
            "processor": recipe.processor,
            "model_name": model_name,
            "model_type": family.info.model_type,
            "caption_field": recipe.caption_field,
            "max_pixels": resolved.max_pixels,
            **({"caption_format": recipe.caption_format, "mode": recipe.video.mode} if recipe.video else {}),
            "recipe": asdict(resolved),
            "fingerprint": resolved.fingerprint,
        }
        workspace.finish(rows, failures, shard_size, header)
    return _result(plan, output, device_names, started, count_buckets(rows), watcher=watcher)


def _resolve(
    recipe: Recipe, family: type[Processor], model_name: str, devices: Sequence[str]
) -> ResolvedRecipe:
    _check_sizes(recipe, family.info.quantum, family.info.temporal_factor)
    dtype = recipe.dtype
    if dtype == "auto":
        dtype = "bfloat16" if all(name.startswith("cuda") for name in devices) else "float32"
    return ResolvedRecipe(
        processor=recipe.processor,
        processor_version=family.info.version,
        weights=family.weights_identity(model_name),
        max_pixels=recipe.max_pixels,
        quantization=family.info.quantum,
        crop_mode=recipe.crop_mode,
        caption_format=recipe.caption_format,
        caption_field=recipe.caption_field,
        dtype=dtype,
        output_format=recipe.output_format,
        stochastic=recipe.stochastic,
        seed=recipe.seed,
        frame_step=family.info.temporal_factor,
        video=recipe.video,
        size=recipe.size,
    )


def _check_sizes(recipe: Recipe, quantum: int, frame_step: int) -> None:
    """What is given as a size must fit the model; the error names the nearest that does."""
    if recipe.size is not None:
        width, height = recipe.size
        near = [max(quantum, round(side / quantum) * quantum) for side in recipe.size]
        if [width, height] != near:
            raise ConfigError(
                f"width {width} and height {height} must be multiples of {quantum}; the nearest is "
                f"{near[0]}x{near[1]}"
            )
    frames = recipe.video and recipe.video.target_frames
    if frames and (frames - 1) % frame_step:
        below = (frames - 1) // frame_step * frame_step + 1
        raise ConfigError(
            f"target_frames is {frames}, but this model takes {frame_step}n+1; the nearest are {below} and "
            f"{below + frame_step}"
        )


def _check_recipe(workspace: Workspace, resolved: ResolvedRecipe) -> None:
    recorded = workspace.recorded_recipe()
    if recorded is not None and "converted" in recorded:
        raise RunError(
            f"{workspace.folder} is where a cache is being converted to; finish that first, or choose another output_dir"
        )
    if recorded is not None and (differences := resolved.differences(recorded)):
        raise RunError(
            f"{workspace.folder} was made by another recipe: {'; '.join(differences)}; choose another "
            "output_dir, or replace it with --overwrite"
        )


def _intact(row: Mapping[str, Any], output: Path, shards: OpenShards) -> bool:
    """Whether the row's bytes are those that were written."""
    if PACKED not in row:
        return bool(content_digest(cache_file_of(output, row)) == row["file_digest"])
    try:
        for place in msgspec.convert(row[PACKED], Entry).places.values():
            shards.check(place)
    except CacheError:
        return False
    return True


def _rows_to_keep(
    plan: Plan,
    known: Mapping[str, Mapping[str, Any]],
    encoded: Mapping[str, Mapping[str, Any]],
    source: Path,
    output: Path,
) -> list[dict[str, Any]]:
    """What the cache holds from now on: what was done, what was encoded, and what this run left out but exists."""
    gone = set(plan.vanished)
    left_out = {
        name: row for name, row in known.items() if row["source_name"] not in plan.files and name not in gone
    }
    rows = []
    for row in ({**left_out, **plan.done, **encoded}).values():
        path_key = "image_path" if "image_path" in row else "video_path"
        cache_file = row["cache_file"] if PACKED in row else str(cache_file_of(output, row))
        rows.append({**row, "cache_file": cache_file, path_key: str(source / row["source_name"])})
    return sorted(rows, key=lambda row: (row["source_name"], row.get("frame_index", 0)))


class _Watcher:
    """Counts what the engine reports and passes it on as progress."""

    def __init__(self, plan: Plan, on_progress: Callable[[Progress], None]) -> None:
        self._total = plan.num_to_encode
        self._on_progress = on_progress
        self._buckets = {sample.name: task.bucket for task in plan.tasks for sample in task.samples}
        self.failures: list[Failure] = []
        self.by_device: dict[str, int] = {}
        self.psnr_db: dict[str, tuple[Bucket, float]] = {}

    def __call__(self, device: str, report: Outcome | Commit) -> None:
        if isinstance(report, Commit):
            return
        self.by_device[device] = self.by_device.get(device, 0) + 1
        if report.failure is not None:
            self.failures.append(Failure(report.name, report.failure))
        if report.psnr_db is not None:
            self.psnr_db[report.name] = (self._buckets[report.name], report.psnr_db)
        done = sum(self.by_device.values())
        self._on_progress(Progress("encode", done, self._total, len(self.failures), dict(self.by_device)))


def _result(
    plan: Plan,
    output: Path,
    devices: Sequence[str],
    started: float,
    buckets: Mapping[Bucket, int],
    *,
    dry_run: bool = False,
    watcher: _Watcher | None = None,
) -> PrepareResult:
    failures = [*plan.skipped, *(watcher.failures if watcher else [])]
    return PrepareResult(
        output_dir=output,
        dry_run=dry_run,
        num_encoded=plan.num_to_encode - (len(watcher.failures) if watcher else 0),
        num_already_done=len(plan.done),
        num_removed=len(plan.vanished),
        failures=tuple(sorted(failures, key=lambda failure: failure.name)),
        buckets=buckets,
        captions=dict(plan.captions),
        caption_problems=plan.caption_problems,
        devices=tuple(devices),
        duration_s=time.monotonic() - started,
        size_bytes=0 if dry_run else sum(p.stat().st_size for p in output.rglob("*") if p.is_file()),
        psnr_db=watcher.psnr_db if watcher else {},
    )
