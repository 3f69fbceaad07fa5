"""Work for a GPU, recorded once for each shape and from then on handed over in a single call.

An encoder is hundreds to thousands of small calls from Python, and before each the calling thread has to get hold
of Python's lock, for which two dozen threads that decode and write compete. A recorded graph needs it once.
Recording costs about one more run, so a shape that comes up a few times only is never recorded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

_CALLS_BEFORE_RECORDING = 3
_MOST_KEPT = 2


class CudaGraphed:
    """A function of one tensor on a GPU to another, which depends on nothing else and waits for nothing."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._function = function
        self._calls: dict[tuple[object, ...], int] = {}
        self._recorded: OrderedDict[tuple[object, ...], _Recording] = OrderedDict()
        self._records = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return self._function(x)
        key = (tuple(x.shape), x.dtype)
        if key not in self._recorded:
            self._calls[key] = self._calls.get(key, 0) + 1
            if self._records and self._calls[key] >= _CALLS_BEFORE_RECORDING:
                self._record(key, x)
        if key in self._recorded:
            self._recorded.move_to_end(key)
            return self._recorded[key].replay(x)
        try:
            return self._function(x)
        except torch.OutOfMemoryError:
            if not self._recorded:
                raise
        # The memory that recordings hold may be what is missing.
        self._give_up("there is too little memory for it")
        return self._function(x)

    def _record(self, key: tuple[object, ...], x: torch.Tensor) -> None:
        while len(self._recorded) >= _MOST_KEPT:
            torch.cuda.synchronize()  # it may still be running
            self._recorded.popitem(last=False)
        stream = torch.cuda.current_stream(x.device)
        try:
            self._recorded[key] = _Recording(self._function, x)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
        else:
            return
        torch.cuda.set_stream(stream)  # a recording that breaks off may leave its own in place
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """Record nothing from now on."""
        logger.info("work for the device is not recorded any more: %s", reason)
        self._records = False
        torch.cuda.synchronize()
        self._recorded.clear()
        torch.cuda.empty_cache()


class _Recording:
    def __init__(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
    ) -> None:
        self._input = x.clone()
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Other threads go on with what they do on the device; only this one is held to what can be recorded.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._output = function(self._input)

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        self._input.copy_(x)
        self._graph.replay()
        return self._output.clone()
