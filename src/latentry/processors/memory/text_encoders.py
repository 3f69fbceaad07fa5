"""The text encoders of a model: on the device for good, or only during a pass over captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from latentry.processors.memory.offload import OffloadedWeights, StreamedLayers, num_bytes, weights_of
from latentry.processors.memory.plan import MemoryPlan


class TextEncoders:
    """The text encoders of a model, placed as a plan says.

    Args:
        largest: The largest text encoder.
        stack: The module in it that has the layers.
        layers: The attribute of ``stack`` that holds them.
        others: The other text encoders, which are small.
        caption_bytes: The working memory for each caption of a batch.
        own_modules_factor: How many times as much the model's own modules take, where there is no fused encoder.
    """

    def __init__(
        self,
        largest: nn.Module,
        stack: Any,
        layers: str,
        *,
        others: Sequence[nn.Module] = (),
        caption_bytes: int,
        own_modules_factor: float = 1.0,
    ) -> None:
        self._caption_bytes, self._own_modules_factor = caption_bytes, own_modules_factor
        self._models = (largest, *others)
        self._stack, self._attribute = stack, layers
        in_layers = {id(tensor) for tensor in weights_of(self.layers)}
        self._other_tensors = [tensor for tensor in weights_of(*self._models) if id(tensor) not in in_layers]
        self._other_weights: OffloadedWeights | None = None
        self._num_places = 0
        for model in self._models:
            model.eval().requires_grad_(False)

    def caption_bytes(self, *, fused: bool) -> int:
        """The working memory for each caption of a batch.

        Args:
            fused: Whether a fused encoder is used, if there is one.
        """
        return int(self._caption_bytes * (1.0 if fused else self._own_modules_factor))

    @property
    def layers(self) -> nn.ModuleList:
        """The layers of the largest text encoder."""
        found: nn.ModuleList = getattr(self._stack, self._attribute)
        return found

    @property
    def layer_bytes(self) -> int:
        """The weights of the largest layer."""
        return max(num_bytes(weights_of(layer)) for layer in nn.ModuleList.__iter__(self.layers))

    @property
    def other_bytes(self) -> int:
        """The weights outside of the layers."""
        return num_bytes(self._other_tensors)

    @property
    def weights(self) -> list[torch.Tensor]:
        """All weights."""
        return weights_of(*self._models)

    @property
    def takes_turns(self) -> bool:
        """Whether the text encoders are on the device only during a pass over captions."""
        return self._other_weights is not None

    def place(self, plan: MemoryPlan, device: torch.device) -> None:
        """Put the weights where the plan wants them. A later plan may leave less on the device, but not more.

        Args:
            plan: The plan.
            device: Where captions are encoded.
        """
        self.close()
        self._num_places = plan.num_text_layers
        if plan.text == "together":
            for model in self._models:
                model.to(device)
        elif not self.takes_turns:
            setattr(self._stack, self._attribute, StreamedLayers(self.layers, device))
            self._other_weights = OffloadedWeights(self._other_tensors, device)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the text encoders on the device inside the context. Contexts may be nested."""
        if self._other_weights is None or self.is_on_device:
            yield
            return
        try:
            self._other_weights.upload()
            self._streamed.open(self._num_places)
            yield
        finally:
            self.close()

    @property
    def is_on_device(self) -> bool:
        """Whether captions can be encoded now."""
        return not self.takes_turns or self._streamed.is_open

    @property
    def _streamed(self) -> StreamedLayers:
        layers = self.layers
        assert isinstance(layers, StreamedLayers)
        return layers

    def close(self) -> None:
        """End a pass over captions, if there is one."""
        if self._other_weights is not None:
            self._other_weights.release()
            self._streamed.close()
