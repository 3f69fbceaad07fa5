"""What Hugging Face Accelerate looks for on a loader.

``Accelerator.prepare`` replaces a ``DataLoader`` by its own one. That one would divide the batches among the ranks a
second time and lose the loader's threads and its state. A loader with the attributes below is registered and left as
it is: ``save_state`` and ``load_state`` use its ``state_dict`` and ``load_state_dict``, and gradient accumulation sees
the end of an epoch. Batches are not moved to a device: build the loader with ``device=accelerator.device``.

Accelerate is not imported here. If a script uses it, it is already loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class AccelerateHooks:
    """The attributes that ``Accelerator`` reads from a loader that it does not replace."""

    _is_accelerate_prepared = True
    """``Accelerator.prepare`` registers the loader as it is."""
    use_stateful_dataloader = True
    """``Accelerator.save_state`` saves ``state_dict()``, and ``load_state`` loads it."""
    end_of_dataloader = False
    """Whether the current batch is the last one; gradients are then synchronized."""
    remainder = 0
    """``Accelerator.gather_for_metrics`` drops nothing: samples that pad a bucket are not at the end."""

    @contextmanager
    def announced_to_accelerate(self) -> Iterator[None]:
        """While it is iterated, the loader is the one whose end Accelerate watches."""
        state = sys.modules.get("accelerate.state")
        if state is None or not state.is_initialized():
            yield
            return
        self.end_of_dataloader = False
        gradient_state = state.GradientState()
        gradient_state._add_dataloader(self)
        try:
            yield
        finally:
            gradient_state._remove_dataloader(self)
