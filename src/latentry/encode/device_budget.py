"""The memory budget of a run: how much of each device's memory it may use.

The budget decides batch sizes, chunk lengths and passes, and the last bits of latents depend on these. So it is a
number that is chosen once, before anything is loaded, and recorded: a resumed run uses it again and makes the same
bytes. It is the same for all devices, because any worker may encode any task. On unequal devices, that leaves some
memory of the larger ones unused.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from latentry.byte_sizes import in_gb, parse_bytes
from latentry.errors import ConfigError, RunError
from latentry.hardware import available_memory

logger = logging.getLogger(__name__)

MIN_BUDGET_BYTES = 500_000_000
_STEP_BYTES = 500_000_000
"""A budget that is not given is a multiple of this, so that small differences in free memory do not matter."""
_ANSWER_LIMIT_S = 300.0
"""How long a process may take to import torch and to ask all devices."""


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """What a run may use of each device."""

    num_bytes: int | None
    """The bytes that each worker may use; None where there is no budget, as on a CPU."""
    is_limit: bool
    """Whether torch must not allocate more than that. A budget that is given or recorded is a limit. The default is an
    estimate of what is free, and torch may use what it finds."""

    @property
    def device_memory(self) -> float:
        """The budget as processors take it."""
        return math.inf if self.num_bytes is None else self.num_bytes


NO_BUDGET = DeviceBudget(None, is_limit=False)


def given_budget(device_memory: float | str | None, devices: Sequence[str]) -> int | None:
    """The budget that the user gave, in bytes; None if there is none. It is an error if the devices lack the memory.

    >>> given_budget("12GB", ["cuda:0"])
    12000000000

    Args:
        device_memory: A size such as ``12GB``, or a number of bytes.
        devices: The device of each worker.
    """
    if device_memory is None:
        return None
    budget = _parsed(device_memory)
    if budget < MIN_BUDGET_BYTES:
        raise ConfigError(_too_small(device_memory, budget))
    if not _workers_by_device(devices):
        raise ConfigError("device_memory has no effect on the CPU; leave it out, or encode on a GPU")
    for device, (available, num_workers) in _memory_per_worker(devices).items():
        if budget > available:
            share = f" for each of its {num_workers} workers" if num_workers > 1 else ""
            raise ConfigError(
                f"device_memory is {in_gb(budget)}, but {device} has {in_gb(available)} available{share}; give at "
                "most that, or end other programs on the device"
            )
    return budget


def run_budget(given: int | None, recorded: int | None, devices: Sequence[str]) -> DeviceBudget:
    """The budget of a run that is about to encode.

    Args:
        given: What ``given_budget`` returned.
        recorded: The budget of the unfinished run that this one resumes, if there is one.
        devices: The device of each worker.
    """
    if given is not None:
        _warn_if_changed(recorded, given, "was asked for")
        return DeviceBudget(given, is_limit=True)
    memory = {device: available for device, (available, _) in _memory_per_worker(devices).items()}
    if not memory:
        return NO_BUDGET
    device, least = min(memory.items(), key=lambda item: item[1])
    if recorded is not None and recorded <= least:
        return DeviceBudget(recorded, is_limit=True)
    if math.isinf(least):
        return NO_BUDGET
    budget = int(least) // _STEP_BYTES * _STEP_BYTES
    if budget < MIN_BUDGET_BYTES:
        raise ConfigError(
            f"{device} has {in_gb(least)} of memory available, and a run needs at least "
            f"{in_gb(MIN_BUDGET_BYTES)}; end other programs on the device, or choose another one"
        )
    _warn_if_changed(recorded, budget, f"is available on {device}")
    return DeviceBudget(budget, is_limit=False)


def _parsed(device_memory: float | str) -> int:
    if isinstance(device_memory, str):
        try:
            return parse_bytes(device_memory)
        except ConfigError as error:
            raise ConfigError(f"device_memory: {error}") from None
    is_number = isinstance(device_memory, (int, float)) and not isinstance(device_memory, bool)
    if not is_number or not math.isfinite(device_memory):
        raise ConfigError(
            f"device_memory is {device_memory!r}; give a size such as '12GB', or a number of bytes"
        )
    return int(device_memory)


def _too_small(device_memory: float | str, budget: int) -> str:
    size = f"{budget} bytes" if budget < 10_000_000 else in_gb(budget)
    text = f"device_memory is {size}; it must be at least {in_gb(MIN_BUDGET_BYTES)}"
    for limit, unit in ((1_000, "GB"), (1_000_000, "MB")):
        if str(device_memory).strip().isdecimal() and 0 < budget < limit:
            return f"{text}; write {budget}{unit} if you mean {unit}"
    return text


def _warn_if_changed(recorded: int | None, budget: int, reason: str) -> None:
    if recorded is not None and recorded != budget:
        logger.warning(
            "this run was begun with %s of device memory, and %s %s now; the last bits of latents may differ from those "
            "of an uninterrupted run",
            in_gb(recorded), in_gb(budget), reason,
        )  # fmt: skip


# ---- asking the devices ---------------------------------------------------------------------


def _workers_by_device(devices: Sequence[str]) -> Counter[str]:
    """How many workers each device has. CPUs are left out, because their memory is not budgeted."""
    found = [torch.device(name) for name in devices]
    return Counter(f"{device.type}:{device.index or 0}" for device in found if device.type != "cpu")


def _memory_per_worker(devices: Sequence[str]) -> dict[str, tuple[float, int]]:
    """Device to (available bytes for each of its workers, number of workers)."""
    workers = _workers_by_device(devices)
    if not workers:
        return {}
    # A process that asks a GPU keeps a CUDA context there, about 0.5 GB. If worker processes encode, this process
    # must not have one.
    found = _asked(list(workers)) if len(devices) == 1 else _asked_in_process(list(workers))
    return {
        device: (available / workers[device], workers[device])
        for device, available in zip(workers, found, strict=True)
    }


def _asked(devices: Sequence[str]) -> list[float]:
    try:
        return [available_memory(device) for device in devices]
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # AssertionError: torch was built without this kind of device
        reason = str(error).strip().partition("\n")[0]
        raise RunError(f"cannot ask {', '.join(devices)} for available memory: {reason}") from None


def _asked_in_process(devices: Sequence[str]) -> list[float]:
    """What ``_asked`` returns, from a process that ends with it."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(list(devices), sender), daemon=True)
    process.start()
    sender.close()
    names = ", ".join(devices)
    try:
        if not receiver.poll(_ANSWER_LIMIT_S):
            raise RunError(
                f"{names} did not answer within {_ANSWER_LIMIT_S:.0f} s when asked for available memory; check that "
                "they work, or choose others"
            )
        answer = receiver.recv()
    except EOFError:
        process.join()
        raise RunError(
            f"the process that asks {names} for available memory died (exit code {process.exitcode})"
        ) from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(answer, RunError):
        raise answer
    return [float(available) for available in answer]


def _answer(devices: Sequence[str], sender: Connection) -> None:
    """The body of the process: send what the devices have, or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    try:
        sender.send(_asked(devices))
    except RunError as error:
        sender.send(error)
