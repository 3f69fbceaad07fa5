"""Weights in main memory that are uploaded for a while. On a CPU, "uploaded" is another place in main memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from latentry.processors.memory import offload
from latentry.processors.memory.offload import OffloadedWeights, StreamedLayers, num_bytes, weights_of

CPU = torch.device("cpu")


class Layer(nn.Module):
    """A layer with parameters of two dtypes and a buffer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(5, 5, generator=generator).bfloat16(), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(5, generator=generator), requires_grad=False)
        self.register_buffer("offset", torch.randn(5, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.float() + self.bias + self.offset)


def through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def test_weights_keep_their_values_and_their_layout():
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).requires_grad_(False)
    before = {
        name: value.clone(memory_format=torch.preserve_format) for name, value in conv.named_parameters()
    }
    offloaded = OffloadedWeights(weights_of(conv), CPU)
    addresses = [tensor.data_ptr() for tensor in weights_of(conv)]
    with offloaded.on_device():
        assert all(t.data_ptr() != address for t, address in zip(weights_of(conv), addresses, strict=True))
        for name, value in conv.named_parameters():
            assert torch.equal(value, before[name])
            assert value.stride() == before[name].stride()
    assert [tensor.data_ptr() for tensor in weights_of(conv)] == addresses
    assert offloaded.num_bytes == num_bytes(weights_of(conv)) >= sum(t.nbytes for t in weights_of(conv))


def test_weights_uploaded_in_inference_mode_can_be_used_outside():
    layer = Layer(0)
    offloaded = OffloadedWeights(weights_of(layer), CPU)
    with torch.inference_mode():
        offloaded.upload()
    assert not layer.weight.is_inference()
    (layer(torch.ones(5)).sum() + torch.ones(1, requires_grad=True)).backward()


def test_shared_weights_are_stored_once():
    first, second = nn.Embedding(7, 3), nn.Embedding(7, 3)
    second.weight = first.weight
    assert len(weights_of(first, second)) == 1


@pytest.mark.parametrize("num_places", [2, 3, 5, 7, 100])
@pytest.mark.parametrize("num_layers", [2, 3, 7])
def test_a_loop_over_layers_computes_the_same_with_any_number_of_places(num_layers, num_places):
    plain = nn.ModuleList(Layer(i) for i in range(num_layers))
    streamed = StreamedLayers((Layer(i) for i in range(num_layers)), CPU)
    x = torch.randn(3, 5)
    assert torch.equal(through(streamed, x), through(plain, x)), "closed: from main memory"
    streamed.open(num_places)
    for _ in range(3):
        assert torch.equal(through(streamed, x), through(plain, x))
    for layer in streamed:
        if layer is streamed[num_layers // 2]:
            break  # a loop may stop early
    assert torch.equal(through(streamed, x), through(plain, x))
    streamed.close()
    assert torch.equal(through(streamed, x), through(plain, x))
    assert len(streamed) == num_layers


@pytest.mark.parametrize(
    ("num_layers", "num_places", "expected"),
    [(7, 2, 7), (7, 4, 5), (7, 7, 0), (24, 20, 6), (24, 23, 2), (28, 14, 16), (24, 11, 15)],
)
def test_a_later_loop_uploads_only_layers_without_a_place_of_their_own(
    num_layers, num_places, expected, monkeypatch
):
    uploads = []
    upload = OffloadedWeights.upload
    monkeypatch.setattr(
        OffloadedWeights, "upload", lambda self, place=None: uploads.append(self) or upload(self, place)
    )
    streamed = StreamedLayers((Layer(i) for i in range(num_layers)), CPU)
    streamed.open(num_places)
    through(streamed, torch.ones(1, 5))
    assert num_layers <= len(uploads) <= num_layers + 2, "at most two for the next loop"
    through(streamed, torch.ones(1, 5))
    num_before = len(uploads)
    through(streamed, torch.ones(1, 5))
    assert len(uploads) - num_before == expected


def test_a_closed_list_leaves_nothing_on_the_device():
    streamed = StreamedLayers((Layer(i) for i in range(4)), CPU)
    in_main_memory = [tensor.data_ptr() for tensor in weights_of(streamed)]
    streamed.open(3)
    through(streamed, torch.ones(1, 5))
    places = [weakref.ref(place) for place in streamed._places]
    assert [tensor.data_ptr() for tensor in weights_of(streamed)] != in_main_memory
    streamed.close()
    assert [tensor.data_ptr() for tensor in weights_of(streamed)] == in_main_memory
    assert all(place() is None for place in places)


def test_pinning_that_is_refused_is_said_once_and_not_tried_again(monkeypatch, caplog):
    calls = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(*arguments: int) -> int:
            calls.append(arguments)
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    monkeypatch.setattr(offload._Pinning, "refused", False)
    device = torch.device("cuda")
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: calls.append("error consumed"))
    for _ in range(3):
        offload._pin(torch.empty(64, dtype=torch.uint8), device)
    assert len(calls) == 2
    assert calls[1] == "error consumed"
    assert caplog.text.count("refuses to pin more main memory") == 1


def test_the_next_layer_is_uploaded_before_its_turn(monkeypatch):
    events = []
    streamed = StreamedLayers((Layer(i) for i in range(5)), CPU)
    number = {id(weights): i for i, weights in enumerate(streamed._weights)}
    upload = OffloadedWeights.upload
    monkeypatch.setattr(
        OffloadedWeights,
        "upload",
        lambda self, place=None: events.append(f"upload {number[id(self)]}") or upload(self, place),
    )
    streamed.open(2)
    for i, _ in enumerate(streamed):
        events.append(f"use {i}")
    for i in range(4):
        assert events.index(f"upload {i + 1}") < events.index(f"use {i}")
        assert events.index(f"upload {i}") < events.index(f"use {i}")
