"""``prepare()``: from a folder of images or videos to a cache. The commands call it, and so can a notebook.

It plans, runs the tasks, and publishes the cache. It can be interrupted anywhere. The same call resumes it, and the
finished cache is the one that an uninterrupted run makes on the same machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import UNSET

from latentry.cache.format import CacheMetadata, Row
from latentry.cache.read.shard_files import OpenShards
from latentry.cache.write.workspace import Workspace
from latentry.encode.device_budget import NO_BUDGET, given_budget, run_budget
from latentry.encode.inputs import Folders, Inputs, source_folders
from latentry.encode.planning.plan import Plan, count_buckets
from latentry.encode.planning.repeats import Repeats
from latentry.encode.progress import OnProgress, Watcher
from latentry.encode.progress import Progress as Progress
from latentry.encode.recipe import Recipe
from latentry.encode.resolved_recipe import ResolvedRecipe, resolve_recipe
from latentry.encode.running.pipeline import CHECKPOINT_INTERVAL_S, MAX_FAILURES
from latentry.encode.running.read_ahead import DAMAGED
from latentry.engines.local import Job, run_tasks
from latentry.errors import CacheError, ConfigError, ModelError, RunError, TooManyFailuresError
from latentry.hardware import find_devices, is_gpu
from latentry.processors import Processor, processor_class
from latentry.report.summary import PrepareResult
from latentry.sources.folder import SourceFolders
from latentry.storage import content_digest
from latentry.types import Bucket, ProcessorInfo


def prepare(
    recipe: Recipe,
    *,
    image_dir: Folders | None = None,
    video_dir: Folders | None = None,
    output_dir: str | os.PathLike[str],
    devices: str = "auto",
    batch_size: int | None = None,
    device_memory: float | str | None = None,
    shard_size: int = 10_000,
    max_files: int | None = None,
    repeats: int | Sequence[int] | None = None,
    verify: bool = False,
    damaged: str = "skip",
    max_failures: int = MAX_FAILURES,
    checkpoint_interval_s: float = CHECKPOINT_INTERVAL_S,
    overwrite: bool = False,
    dry_run: bool = False,
    on_progress: OnProgress = lambda _: None,
) -> PrepareResult:
    """Encode a folder of images, or of videos if the recipe has ``video``, into a cache.

    >>> result = prepare(Recipe(processor="flux", max_pixels=512 * 512), image_dir="photos", output_dir="cache")
    >>> result.num_encoded, result.failures

    Args:
        recipe: Everything that decides the content of the cache.
        image_dir: The folder of images, searched recursively, or a list of folders. Files are named by their path
            relative to the first one.
        video_dir: The folder of videos, or a list of folders. Exactly one of the two is given.
        output_dir: The folder of the cache; created if missing. If it holds an unfinished run of the same recipe,
            the run is resumed; if it holds a finished cache, new and changed inputs are added.
        devices: ``auto`` (every GPU, or the CPU), ``cpu``, ``mps``, or a list such as ``cuda:0,cuda:1`` or ``xpu:0``.
        batch_size: Samples encoded together; None chooses by ``device_memory``, and 1 on a CPU and for clips.
        device_memory: How much of each GPU's memory each worker may use: a size such as ``"12GB"``, or a number of
            bytes. It decides how the run is divided into batches and passes, and so the last bits of latents. None is
            the budget of the run that is resumed, or else what is free when encoding starts.
        shard_size: Rows per metadata shard.
        max_files: Encode only the first N inputs, folder by folder and sorted by name in each.
        repeats: How often an epoch has the samples of each folder: one number for each, or one for all. They are
            encoded once.
        verify: Decode what this run encodes, and measure how close it is to its input. Also compare the checksums of
            samples that are already there, and encode damaged ones again.
        damaged: What to do with inputs whose decoder reports damage: ``skip`` makes them failures, ``keep`` encodes
            what could be decoded and says so in their rows, ``error`` stops the run at the first one.
        max_failures: Stop the run at this many failures in a row. With several devices, each counts its own. 0 removes
            the limit.
        checkpoint_interval_s: Make finished samples durable at least this often, in seconds. They are made durable
            when the run stops, too.
        overwrite: Replace a cache that was made by another recipe.
        dry_run: Only plan; write nothing. It needs no weights: what it cannot find out without them is in the
            result's ``unknown``.
        on_progress: Called as inputs are planned and encoded.
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("shard_size", shard_size, 1),
        ("max_files", max_files, 1),
        ("max_failures", max_failures, 0),
        ("checkpoint_interval_s", checkpoint_interval_s, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    if damaged not in DAMAGED:
        raise ConfigError(f"unknown damaged {damaged!r}; choose one of {', '.join(DAMAGED)}")
    started = time.monotonic()
    processor = processor_class(recipe.processor, recipe.media)
    source = source_folders(recipe, processor.info, image_dir, video_dir)
    output = Path(output_dir).expanduser().absolute()
    device_names = find_devices(devices)
    given = given_budget(device_memory, device_names)
    model_name = recipe.model_name or processor.info.default_model_name
    weights, unknown = _weights(
        processor, model_name, None if overwrite else Workspace(output), dry_run=dry_run
    )
    resolved = resolve_recipe(
        recipe,
        processor.info,
        weights,
        on_gpu=all(is_gpu(name) for name in device_names),
    )
    repeated = Repeats.of(source, repeats)
    inputs = Inputs(recipe, resolved, processor.info, source, output, max_files, damaged, on_progress)

    if dry_run:
        workspace = Workspace(output)
        if not overwrite:
            _check_recipe(workspace, resolved)
        known = {} if overwrite else workspace.rows(resolved.fingerprint)
        plan = inputs.plan(workspace, known, [] if overwrite else workspace.checkpoints())
        return replace(
            _result(
                plan,
                inputs,
                output,
                device_names,
                started,
                plan.buckets(),
                plan.buckets(repeated),
                dry_run=True,
                device_memory=given,
            ),
            unknown=unknown,
        )

    with Workspace.opened(output) as workspace:
        if not overwrite:
            _check_recipe(workspace, resolved)
        workspace.begin(resolved.recorded(), overwrite=overwrite)
        known = workspace.rows(resolved.fingerprint)
        checkpoints = workspace.checkpoints()
        if verify:
            shards = OpenShards(output)
            known = {name: row for name, row in known.items() if _is_intact(row, workspace, shards)}
            checkpoints = [
                replace(c, rows=tuple(row for row in c.rows if _is_intact(row, workspace, shards)))
                for c in checkpoints
            ]
        plan = inputs.plan(workspace, known, checkpoints)
        budget = NO_BUDGET
        if plan.tasks:
            budget = run_budget(given, workspace.unfinished_device_memory(), device_names)
            workspace.record_device_memory(budget.num_bytes)
        watcher = Watcher(plan, on_progress)
        job = Job(
            recipe=resolved,
            model_name=model_name,
            source=source,
            output=output,
            run=workspace.run,
            batch_size=batch_size,
            device_memory=budget.device_memory,
            limit_device_memory=budget.is_limit,
            verify=verify,
            damaged=damaged,
            max_failures=max_failures,
            checkpoint_interval_s=checkpoint_interval_s,
        )
        try:
            run_tasks(job, plan.tasks, device_names, watcher)
        except TooManyFailuresError:
            workspace.record_failures([*plan.skipped, *watcher.failures])
            raise
        encoded = {row.sample_name: row for row in workspace.committed_rows(task.id for task in plan.tasks)}
        rows = repeated.expand(_rows_to_keep(plan, encoded, source, workspace))
        failures = sorted([*plan.skipped, *watcher.failures], key=lambda failure: failure.name)
        metadata = _metadata(recipe, resolved, model_name, processor.info)
        metadata.device_memory = budget.num_bytes if plan.tasks else workspace.recorded_device_memory()
        workspace.finish(rows, failures, shard_size, metadata)
    buckets = count_buckets(row for row in rows if row.repeat == 0)
    return _result(
        plan,
        inputs,
        output,
        device_names,
        started,
        buckets,
        count_buckets(rows),
        watcher=watcher,
        device_memory=budget.num_bytes,
        num_damaged=len({row.source_name for row in rows if row.damage}),
    )


def _weights(
    processor: type[Processor], model_name: str, workspace: Workspace | None, *, dry_run: bool
) -> tuple[str, tuple[str, ...]]:
    """The identity of the weights, and what a dry run cannot know if they are not on this machine."""
    if not dry_run:
        return processor.weights_identity(model_name), ()
    try:
        return processor.weights_identity(model_name, download=False), ()
    except ModelError:
        unknown = f"the weights of {model_name} are not on this machine, so the plan does not check them"
        recorded = (workspace.recorded_recipe() if workspace else None) or {}
        if weights := recorded.get("weights"):
            return str(weights), (f"{unknown}; it assumes that the cache was made with them",)
        return "unknown", (unknown,)


def _metadata(
    recipe: Recipe, resolved: ResolvedRecipe, model_name: str, info: ProcessorInfo
) -> CacheMetadata:
    """What ``metadata.json`` records about a run."""
    return CacheMetadata(
        processor=recipe.processor,
        model_name=model_name,
        model_type=info.model_type,
        caption_format=recipe.caption_format if recipe.video else None,
        caption_field=recipe.caption_field or ("caption" if recipe.video else "internvl"),
        max_pixels=resolved.max_pixels,
        mode=recipe.video.mode if recipe.video else None,
        target_frames=recipe.video.target_frames if recipe.video else UNSET,
        recipe=resolved.recorded(),
        fingerprint=resolved.fingerprint,
        shards=[],
    )


def _check_recipe(workspace: Workspace, resolved: ResolvedRecipe) -> None:
    recorded = workspace.recorded_recipe()
    if recorded is not None and "converted" in recorded:
        raise RunError(
            f"{workspace.folder} holds an unfinished conversion; finish it first, or choose another output_dir"
        )
    if recorded is not None and (differences := resolved.differences(recorded)):
        raise RunError(
            f"{workspace.folder} was made by another recipe: {'; '.join(differences)}; choose another "
            "output_dir, or replace it with --overwrite"
        )


def _is_intact(row: Row, workspace: Workspace, shards: OpenShards) -> bool:
    """Whether the row's bytes on disk are those that were written."""
    if row.packed is None:
        (file,) = row.files(workspace.locator)
        return content_digest(workspace.folder / file) == row.file_digest
    try:
        for location in row.packed.locations.values():
            shards.check(location)
    except CacheError:
        return False
    return True


def _rows_to_keep(
    plan: Plan, encoded: Mapping[str, Row], source: SourceFolders, workspace: Workspace
) -> list[Row]:
    """The rows of the finished cache: done, encoded, and those whose input exists but is not part of this run."""
    rows = []
    for row in {**plan.kept, **plan.done, **encoded}.values():
        path = str(source.path(row.source_name))
        file = row.files(workspace.locator)[0]
        rows.append(
            msgspec.structs.replace(
                row,
                cache_file=row.cache_file if row.packed else str(workspace.folder / file),
                image_path=None if row.image_path is None else path,
                video_path=None if row.video_path is None else path,
                # Rows of version 0.1 count from 0.
                frame_index=None if row.frame_index is None else row.number + 1,
            )
        )
    return rows


def _result(
    plan: Plan,
    inputs: Inputs,
    output: Path,
    devices: Sequence[str],
    started: float,
    buckets: Mapping[Bucket, int],
    items: Mapping[Bucket, int],
    *,
    dry_run: bool = False,
    watcher: Watcher | None = None,
    device_memory: int | None = None,
    num_damaged: int = 0,
) -> PrepareResult:
    failures = [*plan.skipped, *(watcher.failures if watcher else [])]
    return PrepareResult(
        output_dir=output,
        dry_run=dry_run,
        num_encoded=plan.num_to_encode - (len(watcher.failures) if watcher else 0),
        num_captions_only=len(plan.captions_only - {failure.name for failure in failures}),
        num_already_done=len(plan.done),
        num_removed=len(plan.vanished) + len(plan.dropped),
        failures=tuple(sorted(failures, key=lambda failure: failure.name)),
        num_kept=len(plan.kept),
        items=items,
        size_changes=plan.size_changes,
        warnings=plan.warnings,
        ignored=inputs.ignored(),
        left_out=plan.left_out,
        notes=dict(plan.notes) | ({"damaged, and kept": num_damaged} if num_damaged else {}),
        buckets=buckets,
        captions=dict(plan.captions),
        caption_problems=plan.caption_problems,
        devices=tuple(devices),
        device_memory=device_memory,
        duration_s=time.monotonic() - started,
        size_bytes=0 if dry_run else sum(p.stat().st_size for p in output.rglob("*") if p.is_file()),
        psnr_db=watcher.psnr_db if watcher else {},
    )
