"""From a folder of pictures to a cache: the one function behind the command and the notebook.

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

from latentry.buckets import MultiTierBucketCalculator
from latentry.cache.workspace import Workspace
from latentry.captions import CaptionFinder
from latentry.encode import Outcome
from latentry.engines.local import Job, find_devices, run_tasks
from latentry.errors import ConfigError, RunError
from latentry.plan import Plan, Recipe, ResolvedRecipe, make_plan
from latentry.processors import Processor, processor_class
from latentry.records import Commit, Failure
from latentry.report.summary import PrepareResult
from latentry.sources.folder import IMAGE_SUFFIXES, list_folder


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
    image_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    devices: str = "auto",
    batch_size: int | None = None,
    shard_size: int = 10_000,
    max_images: int | None = None,
    verify: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> PrepareResult:
    """Encode a folder of pictures into a cache.

    >>> result = prepare(Recipe(processor="flux", max_pixels=512 * 512), image_dir="photos", output_dir="cache")
    >>> result.num_encoded, result.failures

    ``verify`` decodes every latent again and measures it, ``overwrite`` replaces a cache made by another
    recipe, ``dry_run`` stops after the plan and writes nothing.
    """
    for name, value in (("batch_size", batch_size), ("shard_size", shard_size), ("max_images", max_images)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    started = time.monotonic()
    source, output = (Path(path).expanduser().absolute() for path in (image_dir, output_dir))
    family = processor_class(recipe.processor)
    if family.info.media != "image":
        raise ConfigError(f"the processor {recipe.processor!r} encodes {family.info.media}s, not images")
    files = list_folder(source, IMAGE_SUFFIXES, leave_out=output)[:max_images]
    device_names = find_devices(devices)
    model_name = recipe.model_name or family.info.default_model_name
    resolved = _resolve(recipe, family, model_name, device_names)
    calculator = MultiTierBucketCalculator(resolved.quantization, resolved.max_pixels)
    finder = CaptionFinder(source, recipe.caption_format, recipe.caption_field)

    def plan_for(workspace: Workspace) -> Plan:
        plan = make_plan(
            files,
            source,
            calculator,
            finder,
            known=workspace.rows(),
            failed_before=workspace.failed_before(),
            on_progress=lambda done: on_progress(Progress("plan", done, len(files))),
        )
        if plan.vanished and not plan.done and not overwrite:
            raise RunError(
                f"none of the {len(plan.vanished)} samples in {output} comes from {source}; choose another "
                "output_dir, or replace that cache with --overwrite"
            )
        return plan

    if dry_run:
        workspace = Workspace(output)
        if not overwrite:
            _check_recipe(workspace, resolved)
        plan = plan_for(workspace if not overwrite else Workspace(output / "nothing here yet"))
        return _result(plan, output, device_names, started, dry_run=True)

    with Workspace.opened(output) as workspace:
        if overwrite:
            workspace.clear()
        else:
            _check_recipe(workspace, resolved)
        workspace.record_recipe(asdict(resolved))
        plan = plan_for(workspace)
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
        rows = {**workspace.rows(), **plan.done}
        kept = [rows[name] for name in _row_order(plan, rows) if name in rows]
        failures = sorted([*plan.skipped, *watcher.failures], key=lambda failure: failure.name)
        header = {
            "processor": recipe.processor,
            "model_name": model_name,
            "model_type": family.info.model_type,
            "caption_field": recipe.caption_field,
            "max_pixels": resolved.max_pixels,
            "recipe": asdict(resolved),
            "fingerprint": resolved.fingerprint,
        }
        workspace.finish([_placed(row, output) for row in kept], failures, shard_size, header)
    return _result(plan, output, device_names, started, watcher=watcher)


def _resolve(
    recipe: Recipe, family: type[Processor], model_name: str, devices: Sequence[str]
) -> ResolvedRecipe:
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
    )


def _check_recipe(workspace: Workspace, resolved: ResolvedRecipe) -> None:
    recorded = workspace.recorded_recipe()
    if recorded is not None and (differences := resolved.differences(recorded)):
        raise RunError(
            f"{workspace.folder} was made by another recipe: {'; '.join(differences)}; choose another "
            "output_dir, or replace it with --overwrite"
        )


def _row_order(plan: Plan, rows: Mapping[str, Any]) -> list[str]:
    """This run's inputs in order; then what the cache has of inputs that this run left out but that exist."""
    planned, gone = set(plan.order), set(plan.vanished)
    return sorted([*plan.order, *(name for name in rows if name not in planned and name not in gone)])


def _placed(row: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """The row with the path its file has now: the cache may have been moved since it was written."""
    width, height = row["bucket_resolution"]
    return {**row, "cache_file": str(output / f"{width}x{height}" / Path(row["cache_file"]).name)}


class _Watcher:
    """Counts what the engine reports and passes it on as progress."""

    def __init__(self, plan: Plan, on_progress: Callable[[Progress], None]) -> None:
        self._total = plan.num_to_encode
        self._on_progress = on_progress
        self._buckets = {sample.file.name: task.bucket for task in plan.tasks for sample in task.samples}
        self.failures: list[Failure] = []
        self.by_device: dict[str, int] = {}
        self.psnr_db: dict[str, tuple[tuple[int, int], float]] = {}

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
    *,
    dry_run: bool = False,
    watcher: _Watcher | None = None,
) -> PrepareResult:
    failures = [*plan.skipped, *(watcher.failures if watcher else [])]
    failed = {failure.name for failure in failures}
    buckets = plan.buckets()
    for task in plan.tasks:
        buckets[task.bucket] -= sum(sample.file.name in failed for sample in task.samples)
    return PrepareResult(
        output_dir=output,
        dry_run=dry_run,
        num_encoded=plan.num_to_encode - (len(watcher.failures) if watcher else 0),
        num_already_done=len(plan.done),
        num_removed=len(plan.vanished),
        failures=tuple(sorted(failures, key=lambda failure: failure.name)),
        buckets={bucket: count for bucket, count in buckets.items() if count},
        captions=dict(plan.captions),
        caption_problems=plan.caption_problems,
        devices=tuple(devices),
        duration_s=time.monotonic() - started,
        size_bytes=0 if dry_run else sum(p.stat().st_size for p in output.rglob("*") if p.is_file()),
        psnr_db=watcher.psnr_db if watcher else {},
    )
