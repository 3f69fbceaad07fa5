"""Runs tasks on the devices of this machine, each with its own copy of the model.

A single device runs in the calling process. Several devices get one worker process each, which takes tasks from a
shared queue until it is empty. The process that encodes a task also commits it, so a worker process that dies loses
only the tasks that it had not committed yet. The calling process holds the lock on the cache.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from latentry.cache.format import TASK_SIZE
from latentry.cache.write.workspace import Workspace
from latentry.encode.resolved_recipe import ResolvedRecipe
from latentry.encode.running.memory import load_within_memory
from latentry.encode.running.pipeline import CHECKPOINT_INTERVAL_S, MAX_FAILURES, Outcome, TaskRunner
from latentry.errors import LatentryError, RunError
from latentry.hardware import as_current_device, is_out_of_memory, memory_limit, num_cores
from latentry.processors import Processor, processor_class
from latentry.sources.folder import SourceFolders
from latentry.types import Task

_MAX_READERS = 16
_MAX_SAMPLES_AHEAD = 16 * TASK_SIZE
"""How many samples of later tasks a single worker may take into a pass over captions. One of several workers takes a task,
so that the others have something to do."""
_STOP_LIMIT_S = 10.0
"""How long a worker process may take to write its last checkpoint when the run stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is needed to run tasks. It is pickled and sent to worker processes."""

    recipe: ResolvedRecipe
    model_name: str
    source: SourceFolders
    """The folders of the inputs."""
    output: Path
    """The folder of the cache."""
    run: int
    """The number of the run, which orders its commits."""
    batch_size: int | None
    """Samples that are encoded together; None lets the device decide."""
    verify: bool
    """Whether to decode every latent and measure its PSNR."""
    damaged: str
    """What to do with damaged inputs: ``skip``, ``keep`` or ``error``."""
    max_failures: int = MAX_FAILURES
    """Failures in a row that stop the run; 0 for no limit."""
    checkpoint_interval_s: float = CHECKPOINT_INTERVAL_S
    """How often the finished samples of a running task are made durable."""
    device_memory: float = math.inf
    """The bytes of a device's memory that each worker may use."""
    limit_device_memory: bool = False
    """Whether torch must not allocate more than that."""


Reporter = Callable[[str, Outcome], None]
"""Receives a device name and a sample's outcome."""


def run_tasks(job: Job, tasks: Sequence[Task], devices: Sequence[str], report: Reporter) -> None:
    """Encode and commit all tasks. An error of any worker stops the others and is raised here."""
    if not tasks:
        return
    if len(devices) == 1:
        _run_on_device(job, tasks, devices[0], num_workers=1, report=report)
    else:
        _run_in_processes(job, tasks, devices, report)


def _run_on_device(
    job: Job, tasks: Iterable[Task], device: str, *, num_workers: int, report: Reporter
) -> None:
    """Encode and commit tasks on one device; the machine's cores are divided among ``num_workers``."""
    cores = max(1, num_cores() // num_workers)
    if num_workers > 1:
        torch.set_num_threads(cores)
    with (
        as_current_device(device),
        memory_limit(device, job.device_memory) if job.limit_device_memory else nullcontext(),
        _device_errors_in_one_line(device),
    ):
        processor = _load(job, device)
        runner = TaskRunner(
            processor,
            job.recipe,
            job.source,
            Workspace(job.output, job.run),
            batch_size=job.batch_size,
            # A quarter of the cores is left to the thread that feeds the device and to the writers.
            num_threads=min(_MAX_READERS, max(2, cores * 3 // 4)),
            max_samples_ahead=_MAX_SAMPLES_AHEAD if num_workers == 1 else TASK_SIZE,
            device=device,
            verify=job.verify,
            damaged=job.damaged,
            max_failures=job.max_failures,
            checkpoint_interval_s=job.checkpoint_interval_s,
            on_outcome=lambda outcome: report(device, outcome),
        )
        runner.run(tasks)


def _load(job: Job, device: str) -> Processor:
    def load(budget: float) -> Processor:
        return processor_class(job.recipe.processor)(
            job.model_name,
            torch.device(device),
            getattr(torch, job.recipe.dtype),
            text_dtype=job.recipe.text_dtype,
            device_memory=budget,
        )

    return load_within_memory(load, job.device_memory, torch.device(device))


@contextmanager
def _device_errors_in_one_line(device: str) -> Iterator[None]:
    """Say in one line that torch has no kernel for an operation of the model, or that memory ran out unexpectedly."""
    try:
        yield
    except NotImplementedError as error:
        if "aten::" not in str(error):
            raise
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        remedy = "set PYTORCH_ENABLE_MPS_FALLBACK=1, or use" if device == "mps" else "use"
        raise RunError(f"torch cannot run the model on {device}: {reason}; {remedy} --devices cpu") from None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(
            f"{device} ran out of memory; finished samples are kept: free memory on it and rerun the same command to "
            "resume, or rerun it with a smaller --device_memory"
        ) from None


# ---- several devices ------------------------------------------------------------------------


def _run_in_processes(job: Job, tasks: Sequence[Task], devices: Sequence[str], report: Reporter) -> None:
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    for task in tasks:
        queue.put(task)
    for _ in devices:
        queue.put(None)  # one end mark per worker
    # Each worker has its own pipe: a worker that is killed while it writes cannot corrupt another's reports.
    pipes = [context.Pipe(duplex=False) for _ in devices]
    workers = [
        context.Process(target=_work, args=(job, device, len(devices), queue, sender), daemon=True)
        for device, (_, sender) in zip(devices, pipes, strict=True)
    ]
    for worker in workers:
        worker.start()
    for _, sender in pipes:
        sender.close()
    try:
        _collect([receiver for receiver, _ in pipes], workers, devices, report)
    finally:
        _stop(workers)
        Workspace(job.output).remove_drafts()
        queue.cancel_join_thread()
        queue.close()


def _stop(workers: Sequence[Any]) -> None:
    """Let the workers write their last checkpoints; kill those that take too long, or if the user insists."""
    for worker in workers:
        worker.terminate()
    deadline_s = time.monotonic() + _STOP_LIMIT_S
    try:
        for worker in workers:
            worker.join(max(0.0, deadline_s - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()


def _work(job: Job, device: str, num_workers: int, queue: Any, reports: Connection) -> None:
    """The body of a worker process. Its last report is None, or the error that stopped it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and terminates its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        last = _outcome_of(job, device, num_workers, queue, reports)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may end this process from now on
        reports.send(last)
    except KeyboardInterrupt:
        pass  # the parent stops the run; what was finished is saved


def _outcome_of(
    job: Job, device: str, num_workers: int, queue: Any, reports: Connection
) -> LatentryError | None:
    """Run the tasks in the queue and return the error that stopped them, if any."""
    try:
        _run_on_device(
            job,
            iter(queue.get, None),
            device,
            num_workers=num_workers,
            report=lambda _, outcome: reports.send(outcome),
        )
    except LatentryError as error:
        return error
    except Exception:  # a bug: the parent reports it with the device's name
        return RunError(f"the worker on {device} failed: {traceback.format_exc()}")
    return None


def _interrupt(*_: object) -> NoReturn:
    """Stop the run in this process. A second signal, such as one to the whole process group, changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _exit_with_parent() -> None:
    """Exit when the parent process ends: its lock on the output folder is released then."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _collect(
    receivers: Sequence[Connection], workers: Sequence[Any], devices: Sequence[str], report: Reporter
) -> None:
    """Pass on the workers' reports until every worker has finished."""
    unfinished = dict(zip(receivers, range(len(workers)), strict=True))
    while unfinished:
        for receiver in multiprocessing.connection.wait(list(unfinished)):
            assert isinstance(receiver, Connection)
            number = unfinished[receiver]
            try:
                content = receiver.recv()
            except (EOFError, OSError):
                workers[number].join()
                raise RunError(
                    f"the worker on {devices[number]} died (exit code {workers[number].exitcode}): committed "
                    "work is kept; rerun the same command to resume"
                ) from None
            if isinstance(content, LatentryError):
                raise content
            if content is None:
                del unfinished[receiver]
            else:
                report(devices[number], content)
