"""Running out of device memory, while loading a model or at any step after that: a smaller plan, then one clear line.

Plans are made to fit. But estimates can be wrong, and another program may take memory during a run. Then the model is
told to use less, as often as it can, and the step is repeated. Nothing is lost: no step has an effect before it is
finished.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from latentry.errors import RunError
from latentry.hardware import available_memory, is_out_of_memory, release_cached_memory
from latentry.processors.base import Processor, StackedFields
from latentry.processors.memory.plan import gigabytes

logger = logging.getLogger(__name__)

_LEAST_BUDGET = 500_000_000
Result = TypeVar("Result")


def load_within_memory(load: Callable[[float], Processor], budget: float, device: torch.device) -> Processor:
    """Load a model; if the device runs out of memory, with a smaller budget.

    Args:
        load: Takes a budget in bytes and returns the loaded model.
        budget: The budget to begin with.
        device: The device.
    """
    while True:
        processor = _unless_out_of_memory(load, budget)
        if processor is not None:
            return processor
        release_cached_memory(device)
        tried, budget = budget, min(0.75 * budget, available_memory(device))
        if budget < _LEAST_BUDGET:
            raise RunError(
                f"{device} ran out of memory while the model was loaded, with a budget of {gigabytes(tried)}; free memory "
                "on it, or use --devices cpu"
            )
        logger.warning("%s ran out of memory while the model was loaded; trying with less", device)


class WithinMemory:
    """Calls methods of a processor, and makes it use less memory where that runs out.

    Args:
        processor: The loaded model.
        device: Its device.
    """

    def __init__(self, processor: Processor, device: torch.device) -> None:
        self._processor = processor
        self._device = device

    def attempt(self, step: Callable[[], Result]) -> Result:
        """Return ``step()``; where memory runs out, use less of it and repeat the step."""
        while True:
            result = _unless_out_of_memory(lambda _: (step(),), None)
            if result is not None:
                return result[0]
            release_cached_memory(self._device)
            if not self._processor.use_less_memory():
                raise RunError(_too_small(self._device))

    def call(self, step: Callable[[Any], StackedFields], batch: Any) -> StackedFields:
        """Return ``step(batch)``; where memory runs out, use less of it, or join the results of two halves.

        Args:
            step: Takes a batch and returns one column per field.
            batch: Anything with a length that can be sliced.
        """
        while True:
            columns = _unless_out_of_memory(step, batch)
            if columns is not None:
                return columns
            release_cached_memory(self._device)
            if not self._processor.use_less_memory():
                break
        if len(batch) == 1:
            raise RunError(_too_small(self._device))
        half = len(batch) // 2
        first, second = self.call(step, batch[:half]), self.call(step, batch[half:])
        return {key: torch.cat([column, second[key]]) for key, column in first.items()}


def _too_small(device: torch.device) -> str:
    return (
        f"the memory of {device} is too small for a single sample; choose a smaller resolution or fewer frames, or a device "
        "with more memory"
    )


def _unless_out_of_memory(call: Callable[[Any], Result], argument: Any) -> Result | None:
    """The result; None if memory ran out. The caller handles that after the exception, whose traceback keeps tensors."""
    try:
        return call(argument)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
