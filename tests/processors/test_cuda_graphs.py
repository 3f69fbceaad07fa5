"""When graphs are captured, replayed and dropped. Without a GPU: a captured function is called again."""

from __future__ import annotations

import pytest
import torch

from latentry.processors.fused import cuda_graphs


class _OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(shape).as_subclass(_OnGpu)


@pytest.fixture
def fake_graphs(monkeypatch):
    """What happens to graphs, as a list of "captured" and "replayed"; and the class, whose capture can be refused."""
    events: list[str] = []

    class Graph:
        refuse: type[Exception] | None = None

        def __init__(self, function, x):
            if Graph.refuse:
                raise Graph.refuse("no")
            self._function = function
            events.append("captured")

        def replay(self, x):
            events.append("replayed")
            return self._function(x)

    monkeypatch.setattr(cuda_graphs, "_Graph", Graph)
    for name in ("current_stream", "set_stream", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return events, Graph


def test_a_shape_is_captured_at_its_third_call(fake_graphs):
    events, _ = fake_graphs
    calls = []
    twice = cuda_graphs.GraphedFunction(lambda x: calls.append("called") or x * 2)
    for _ in range(5):
        assert twice(on_gpu(3)).sum() == 6
    assert events == ["captured", "replayed", "replayed", "replayed"]
    twice(on_gpu(4))
    assert events[-1] == "replayed", "a new shape starts with eager calls"
    assert len(calls) == 6
    for side in range(10, 14):
        for _ in range(3):
            twice(on_gpu(side))
    assert len(twice._graphs) == 2, "only the latest two graphs are kept"


def test_no_capture_after_a_failed_one(fake_graphs):
    events, graph = fake_graphs
    graph.refuse = torch.OutOfMemoryError
    twice = cuda_graphs.GraphedFunction(lambda x: x * 2)
    for _ in range(6):
        assert twice(on_gpu(3)).sum() == 6
    graph.refuse = None
    twice(on_gpu(3))
    assert events == []


def test_a_single_graph_leaves_its_memory_to_another_shape(fake_graphs):
    events, _ = fake_graphs
    graphs_beside = []
    twice = cuda_graphs.GraphedFunction(lambda x: graphs_beside.append(len(twice._graphs)) or x * 2)
    twice.max_graphs = 1
    for _ in range(4):
        twice(on_gpu(3))
    assert events == ["captured", "replayed", "replayed"]
    graphs_beside.clear()
    assert twice(on_gpu(9)).sum() == 18
    assert graphs_beside == [0]
    twice(on_gpu(3))
    assert events.count("captured") == 2, "a shape that was captured once is captured again at once"


def test_released_graphs_are_captured_again(fake_graphs):
    events, _ = fake_graphs
    twice = cuda_graphs.GraphedFunction(lambda x: x * 2)
    for _ in range(3):
        twice(on_gpu(3))
    twice.release()
    assert not twice._graphs
    twice(on_gpu(3))
    assert events == ["captured", "replayed"] * 2
    twice.max_graphs = 0
    twice.release()
    twice(on_gpu(3))
    assert len(events) == 4
