"""Weights that wait in main memory and are on the device only while they are needed.

The main memory is pinned, so that a copy runs at the full speed of the bus, beside the computation. Pinning memory that
torch allocated normally takes a tenth of the time of ``pin_memory()``, which also rounds each size up to a power of two.
Where the system refuses to pin that much, the copies are slower.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import nn

logger = logging.getLogger(__name__)

_ALIGNMENT = 256


def weights_of(*modules: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of modules, each once."""
    found = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return list({id(tensor): tensor for tensor in found}.values())


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The size of tensors as one aligned block of memory."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class OffloadedWeights:
    """Tensors whose content is in main memory, in one block, and on the device between ``upload`` and ``release``.

    Args:
        tensors: Parameters or buffers. They keep their identity; only their content is elsewhere from now on.
        device: Where they are used.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._tensors = tensors
        self.num_bytes = num_bytes(tensors)
        self._in_main_memory = torch.empty(self.num_bytes, dtype=torch.uint8)
        for tensor, view in zip(tensors, self._views(self._in_main_memory), strict=True):
            view.copy_(tensor)
            tensor.data = view
        _pin(self._in_main_memory, device)

    def _views(self, block: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensors inside a block of bytes, with the shapes and strides they have."""
        start = 0
        for tensor in self._tensors:
            values = block[start : start + tensor.nbytes].view(tensor.dtype)
            yield values.as_strided(tensor.shape, tensor.stride())
            start += _aligned(tensor.nbytes)

    def upload(self, place: torch.Tensor | None = None) -> None:
        """Copy the tensors to the device, without waiting for the copy.

        Args:
            place: Bytes on the device, at least ``num_bytes``. None allocates them until ``release``.
        """
        # Weights must stay usable outside of inference mode, in which this may be called.
        with torch.inference_mode(False):
            if place is None:
                place = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
            block = place[: self.num_bytes]
            block.copy_(self._in_main_memory, non_blocking=True)
            self._point_to(block)

    def release(self) -> None:
        """Stop using the copy on the device. Work that is queued there still sees it."""
        with torch.inference_mode(False):
            self._point_to(self._in_main_memory)

    def _point_to(self, block: torch.Tensor) -> None:
        for tensor, view in zip(self._tensors, self._views(block), strict=True):
            tensor.data = view

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the tensors on the device inside the context."""
        self.upload()
        try:
            yield
        finally:
            self.release()


class StreamedLayers(nn.ModuleList):
    """Layers in main memory: a loop over them uploads each layer before its turn.

    The first layers keep their places on the device until ``close``. The others share the last two places: while one of
    them computes, the next is uploaded. Code that loops over all layers of a model works with it unchanged.

    Args:
        layers: The layers, whose weights are in main memory.
        device: Where they compute.
    """

    def __init__(self, layers: Iterable[nn.Module], device: torch.device) -> None:
        super().__init__(layers)
        self._device = device
        self._weights = [OffloadedWeights(weights_of(layer), device) for layer in super().__iter__()]
        self._places: list[torch.Tensor] = []
        self._layer_in_place: dict[int, int] = {}
        self._uploaded: dict[int, torch.cuda.Event] = {}
        self._uploads: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._uploads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def is_open(self) -> bool:
        """Whether the layers have places on the device."""
        return bool(self._places)

    def open(self, num_places: int) -> None:
        """Give the layers places on the device, two at least."""
        size = max(weights.num_bytes for weights in self._weights)
        with torch.inference_mode(False):
            self._places = [
                torch.empty(size, dtype=torch.uint8, device=self._device)
                for _ in range(min(num_places, len(self)))
            ]

    def close(self) -> None:
        """Give the places up. Work that is queued on the device still sees the layers."""
        if self._uploads is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._uploads)
        for weights in self._weights:
            weights.release()
        self._places, self._layer_in_place, self._uploaded = [], {}, {}

    def __iter__(self) -> Iterator[nn.Module]:
        for number, layer in enumerate(super().__iter__()):
            if self._places:
                self._make_ready(number)
            yield layer

    def _place_of(self, layer: int) -> int:
        num_fixed = len(self._places) if len(self._places) == len(self) else len(self._places) - 2
        return layer if layer < num_fixed else num_fixed + (layer - num_fixed) % 2

    def _make_ready(self, layer: int) -> None:
        """Let the device wait for this layer, and upload the next one that is missing beside its computation."""
        if self._layer_in_place.get(self._place_of(layer)) != layer:
            self._upload(layer)
        if layer in self._uploaded:
            torch.cuda.current_stream(self._device).wait_event(self._uploaded[layer])
        for num_steps in range(1, len(self)):
            following = (layer + num_steps) % len(self)
            held = self._layer_in_place.get(self._place_of(following))
            if held != following:
                # The place is taken only from a layer that is needed later than this one, and never from the current one.
                if held is None or (held - layer) % len(self) > num_steps:
                    self._upload(following)
                return

    def _upload(self, layer: int) -> None:
        place = self._place_of(layer)
        before = self._layer_in_place.get(place)
        if before is not None:
            self._weights[before].release()
        self._layer_in_place[place] = layer
        if self._uploads is None:
            self._weights[layer].upload(self._places[place])
            return
        # Everything that uses the place is queued by now, and must have run before the place is overwritten.
        self._uploads.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._uploads):
            self._weights[layer].upload(self._places[place])
        self._uploaded[layer] = self._uploads.record_event()


def _pin(block: torch.Tensor, device: torch.device) -> None:
    """Pin a block of main memory, until it is freed, so that copies from it run beside the computation."""
    if device.type != "cuda" or not block.nbytes:
        return
    if _Pinning.refused:
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)) == 0:
        weakref.finalize(block, runtime.cudaHostUnregister, block.data_ptr())
        return
    _Pinning.refused = True
    logger.warning("the system refuses to pin more main memory; weights are uploaded more slowly")
    with suppress(RuntimeError):
        torch.zeros(1, device=device)  # CUDA reports the failure once more, at the next kernel


class _Pinning:
    """Whether the system has refused to pin memory. It is not asked again then."""

    refused = False
