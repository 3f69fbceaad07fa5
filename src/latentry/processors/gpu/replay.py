"""Work for a GPU, recorded once for each shape and from then on handed over in a single call.

An encoder is hundreds to thousands of small calls from Python, and before each the calling thread has to get hold
of Python's lock, for which two dozen threads that decode and write compete. A recorded graph needs it once.
Recording costs about one more run, so a shape that comes up a few times only is never recorded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

_CALLS_BEFORE_RECORDING = 3
_MOST_KEPT = 16


class Replayed:
    """A function of one tensor on a GPU to another, which depends on nothing else and waits for nothing."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._function = function
        self._calls: dict[tuple[object, ...], int] = {}
        self._recorded: OrderedDict[tuple[object, ...], _Recording] = OrderedDict()
        self._pool: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return self._function(x)
        key = (tuple(x.shape), x.dtype)
        recording = self._recorded.get(key)
        if recording is not None:
            self._recorded.move_to_end(key)
            return recording.replay(x)
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] == _CALLS_BEFORE_RECORDING:
            self._record(key, x)
        return self._function(x)

    def _record(self, key: tuple[object, ...], x: torch.Tensor) -> None:
        # One after the other they may use the same memory: what comes out is copied before the next begins.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            self._recorded[key] = _Recording(self._function, x, self._pool)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            torch.cuda.synchronize()
            logger.info("%s is not recorded: %s", key, str(error).partition("\n")[0])
            return
        if len(self._recorded) > _MOST_KEPT:
            self._recorded.popitem(last=False)


class _Recording:
    def __init__(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        pool: Any,
    ) -> None:
        self._input = x.clone()
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Other threads go on with what they do on the device; only this one is held to what can be recorded.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = function(self._input)

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        self._input.copy_(x)
        self._graph.replay()
        return self._output.clone()
