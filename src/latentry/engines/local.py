"""This machine: one worker per device, each with its own copy of the model.

A single device is served by the calling process. With several, each has a process of its own that pulls
tasks until there are none; a task is committed by whoever ran it, so a worker that dies loses only the
tasks it was at: those it read, encoded or still wrote, and none that was committed.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from latentry.cache.write.commits import Commit
from latentry.cache.write.workspace import Workspace
from latentry.encode.pipeline import Outcome, TaskRunner
from latentry.encode.recipe import ResolvedRecipe
from latentry.errors import ConfigError, LatentryError, RunError
from latentry.hardware import num_cores
from latentry.processors import processor_class
from latentry.types import Task

_MOST_READERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every worker needs to know; it crosses processes."""

    recipe: ResolvedRecipe
    model_name: str
    source: Path
    output: Path
    run: int
    """The number of the run, which orders its commits."""
    batch_size: int | None
    """Samples encoded together; None leaves it to the device."""
    verify: bool


Watch = Callable[[str, Outcome | Commit], None]
"""Called with the device's name for every sample, and, where there is one device, for every committed task."""


def find_devices(wanted: str) -> list[str]:
    """The devices meant: ``auto`` is every GPU, or the CPU; else names such as ``cuda:0,cuda:1`` or ``0,1``.

    >>> find_devices("cpu")
    ['cpu']
    """
    if wanted == "auto":
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    devices = []
    for part in (part.strip() for part in wanted.split(",")):
        name = f"cuda:{part}" if part.isdigit() else part
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ConfigError(
                f"device {part!r} is none; write for example auto, cpu, cuda:0 or 0,1"
            ) from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"there is no device {name}; this machine has {torch.cuda.device_count()} GPUs")
        devices.append(name)
    return devices


def run_tasks(job: Job, tasks: Sequence[Task], devices: Sequence[str], watch: Watch) -> None:
    """Carry out all tasks and commit each."""
    if not tasks:
        return
    if len(devices) == 1:
        _work(job, tasks, devices[0], share=1, watch=watch)
    else:
        _run_in_processes(job, tasks, devices, watch)


def _work(job: Job, tasks: Iterable[Task], device: str, share: int, watch: Watch) -> None:
    """Run tasks until there are none; ``share`` workers divide the processor's cores among them."""
    cores = max(1, num_cores() // share)
    if share > 1:
        torch.set_num_threads(cores)
    # Kernels, events and recorded graphs go to the device that is the current one.
    with torch.cuda.device(device) if device.startswith("cuda") else nullcontext():
        processor = processor_class(job.recipe.processor)(
            job.model_name, torch.device(device), getattr(torch, job.recipe.dtype)
        )
        workspace = Workspace(job.output, job.run)
        runner = TaskRunner(
            processor,
            job.recipe,
            job.source,
            job.output,
            batch_size=job.batch_size,
            num_threads=min(_MOST_READERS, max(2, cores * 3 // 4)),  # the rest feeds the device, and writes
            device=device,
            verify=job.verify,
            on_outcome=lambda outcome: watch(device, outcome),
        )
        for commit in runner.run(tasks):
            workspace.commit(commit)
            watch(device, commit)


# ---- several devices ------------------------------------------------------------------------


def _run_in_processes(job: Job, tasks: Sequence[Task], devices: Sequence[str], watch: Watch) -> None:
    context = multiprocessing.get_context("spawn")
    waiting: Any = context.Queue()
    for task in tasks:
        waiting.put(task)
    for _ in devices:
        waiting.put(None)
    # A pipe for each: what a worker that was killed had half written then concerns nobody else.
    pipes = [context.Pipe(duplex=False) for _ in devices]
    workers = [
        context.Process(target=_worker, args=(job, device, len(devices), waiting, sender), daemon=True)
        for device, (_, sender) in zip(devices, pipes, strict=True)
    ]
    for worker in workers:
        worker.start()
    for _, sender in pipes:
        sender.close()
    try:
        _collect([receiver for receiver, _ in pipes], workers, devices, watch)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
        Workspace(job.output).remove_drafts()
        waiting.cancel_join_thread()
        waiting.close()


def _worker(job: Job, device: str, share: int, waiting: Any, reports: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_follow_parent, daemon=True).start()

    def watch(_: str, report: Outcome | Commit) -> None:
        if isinstance(report, Outcome):  # commits are on disk, and large
            reports.send(report)

    try:
        _work(job, iter(waiting.get, None), device, share, watch)
        reports.send(None)
    except LatentryError as error:
        reports.send(error)
    except Exception:  # reported, so that the parent can say which device it was
        reports.send(RunError(f"the worker on {device} failed: {traceback.format_exc()}"))


def _follow_parent() -> None:
    """End this process when its parent has: nobody else may work in the folder it had locked."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _collect(
    receivers: Sequence[Connection], workers: Sequence[Any], devices: Sequence[str], watch: Watch
) -> None:
    """Pass on what the workers report, until all have said that they are done."""
    unfinished = dict(zip(receivers, range(len(workers)), strict=True))
    while unfinished:
        for receiver in multiprocessing.connection.wait(list(unfinished)):
            assert isinstance(receiver, Connection)
            number = unfinished[receiver]
            try:
                report = receiver.recv()
            except (EOFError, OSError):
                workers[number].join()
                raise RunError(
                    f"the worker on {devices[number]} died (exit code {workers[number].exitcode}); what is "
                    "committed is kept, and the same command goes on"
                ) from None
            if isinstance(report, LatentryError):
                raise report
            if report is None:
                del unfinished[receiver]
            else:
                watch(devices[number], report)
