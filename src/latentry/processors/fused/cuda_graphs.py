"""CUDA graphs: capture the kernels of an encoder once per shape, then replay them with a single call.

An encoder launches hundreds to thousands of kernels from Python, and the launching thread needs the GIL for each. Two
dozen threads that decode and write compete for it. A replayed graph needs the GIL once. Capturing costs about as much
as one run, so the first two calls with a shape run eagerly; they also warm up the kernels, which a capture requires.
A shape that occurs only a few times is never captured.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

_CALLS_UNTIL_CAPTURE = 3


class GraphedFunction:
    """Calls a function of one tensor, through CUDA graphs where that pays off.

    The function must depend on its argument alone and must not wait for the device. On a CPU it is simply called. If a
    capture fails, all calls run eagerly from then on.

    Args:
        function: Takes a tensor and returns a new one.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._function = function
        self._num_calls: dict[tuple[object, ...], int] = {}
        self._graphs: OrderedDict[tuple[object, ...], _Graph] = OrderedDict()
        self._may_capture = True
        self.max_graphs = 2
        """Each graph keeps its memory, so only the graphs of the most recent shapes are kept. With 1, another shape
        never has to share the memory with a graph."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return self._function(x)
        key = (tuple(x.shape), x.dtype)
        if key not in self._graphs:
            if self.max_graphs < 2:
                self.release()
            self._num_calls[key] = self._num_calls.get(key, 0) + 1
            if self._may_capture and self.max_graphs and self._num_calls[key] >= _CALLS_UNTIL_CAPTURE:
                self._capture(key, x)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key].replay(x)
        return self._function(x)

    def release(self) -> None:
        """Drop all graphs, and free their memory."""
        if self._graphs:
            torch.cuda.synchronize()  # a graph may still be running
            self._graphs.clear()
            torch.cuda.empty_cache()

    def stop(self) -> None:
        """Run eagerly from now on."""
        self._may_capture = False
        self.release()

    def _capture(self, key: tuple[object, ...], x: torch.Tensor) -> None:
        while len(self._graphs) >= self.max_graphs:
            torch.cuda.synchronize()  # the graph may still be running
            self._graphs.popitem(last=False)
        stream = torch.cuda.current_stream(x.device)
        try:
            self._graphs[key] = _Graph(self._function, x)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
        else:
            return
        torch.cuda.set_stream(stream)  # a failed capture may leave its own stream current
        logger.info("encoding continues without CUDA graphs: %s", reason)
        self.stop()
        torch.cuda.empty_cache()


class _Graph:
    """One captured graph, with the memory of its input and its output."""

    def __init__(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
    ) -> None:
        self._input = x.clone()
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # With "thread_local", other threads may keep using the device during the capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._output = function(self._input)

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        self._input.copy_(x)
        self._graph.replay()
        return self._output.clone()
