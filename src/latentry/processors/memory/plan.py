"""Which parts of a model are on the device at the same time: a pure function of sizes and a budget.

A text encoder is ten to a hundred times as large as the VAE beside it. There are three ways to use a budget:

- **together**: everything is on the device. That needs the most memory, and nothing is ever uploaded twice.
- **turns**: captions and pixels are encoded in alternating passes over some hundreds of samples. The text encoders are on
  the device during a pass over captions, and in main memory otherwise.
- **streamed**: the same, but not all layers of the text encoder fit even then. The first layers stay for the pass. The
  others follow each other through two places, and the next one is uploaded while one computes.

How the text encoders are placed does not change their numbers, unless memory is so short that batches of captions get
smaller. The memory for pixels decides batch sizes and the lengths of temporal chunks, and with them the last bits of
latents. So a plan depends on nothing but sizes and budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from latentry.errors import RunError

TEXT_BATCH_SIZE = 32
"""How many captions are encoded together, where memory allows."""
RESERVED_BYTES = 400_000_000
"""For what is not planned: workspaces of libraries, pixels on their way, results."""
FULL_SPEED_BYTES = 6_000_000_000
"""Working memory with which every VAE is as fast as it gets: more makes batches and chunks larger, but not faster."""
SEVERAL_GRAPHS_BYTES = 75_000_000_000
"""Working memory in which CUDA graphs of two shapes, and a third shape, can exist at the same time."""
LEAST_PIXEL_BYTES = 1_000_000_000
"""Working memory for encoding in tiles, which is the last resort."""
_PLACES_FOR_STREAMING = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What a model needs of a device's memory, in bytes."""

    vae_encoder: int
    """The weights that encode pixels. They never leave the device."""
    decoder: int = 0
    """The VAE's decoder, which only verification needs."""
    image_encoder: int = 0
    """A model for further fields of pixels, which each batch needs for a moment."""
    num_text_layers: int
    """The equal layers of the largest text encoder."""
    text_layer: int
    """The weights of one of them."""
    other_text: int
    """The other weights of all text encoders, such as embeddings, and what layers with 8-bit weights work in."""
    caption: int
    """The working memory for each caption of a batch."""

    @property
    def text(self) -> int:
        """All weights of the text encoders."""
        return self.num_text_layers * self.text_layer + self.other_text

    @property
    def budget_for_all(self) -> int:
        """The device memory with which everything can stay on the device."""
        weights = self.vae_encoder + self.decoder + self.image_encoder + self.text
        return RESERVED_BYTES + weights + TEXT_BATCH_SIZE * self.caption + FULL_SPEED_BYTES

    @property
    def smallest_budget(self) -> int:
        """The least device memory with which the model can be used at all."""
        streamed = self.other_text + _PLACES_FOR_STREAMING * self.text_layer + self.caption
        pixels = max(self.decoder, self.image_encoder) + LEAST_PIXEL_BYTES
        return RESERVED_BYTES + self.vae_encoder + max(streamed, pixels)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """How a model uses its budget."""

    text: Literal["together", "turns", "streamed"]
    num_text_layers: int
    """How many layers of the text encoder have a place on the device."""
    text_batch_size: int
    pixel_bytes: float
    """The working memory for pixels."""
    num_graphs: int
    """How many CUDA graphs of each encoder are kept. Text encoders that come and go have none."""

    def __str__(self) -> str:
        placed = {
            "together": "the text encoders stay on the device",
            "turns": "text encoders and VAE take turns on the device",
            "streamed": f"{self.num_text_layers} layers of the text encoder at a time take turns with the VAE",
        }[self.text]
        return f"{placed}; {gigabytes(self.pixel_bytes)} for pixels"


def plan_memory(sizes: ModelSizes, budget: float, *, for_large_samples: bool = False) -> MemoryPlan:
    """The plan for a budget. A budget that is too small is an error that names the smallest one.

    Args:
        sizes: What the model needs.
        budget: The bytes of device memory that may be used.
        for_large_samples: Leave pixels as much memory as possible, for samples that would have to be tiled otherwise.
    """
    if budget < sizes.smallest_budget:
        raise RunError(
            f"this model needs at least {gigabytes(sizes.smallest_budget)} of device memory, and "
            f"{gigabytes(budget)} may be used; free memory on the device or raise --device_memory, or use --devices cpu"
        )
    if not for_large_samples and budget >= sizes.budget_for_all:
        left = budget - sizes.budget_for_all + FULL_SPEED_BYTES
        return MemoryPlan(
            text="together",
            num_text_layers=sizes.num_text_layers,
            text_batch_size=TEXT_BATCH_SIZE,
            pixel_bytes=left,
            num_graphs=2 if left >= SEVERAL_GRAPHS_BYTES else 1,
        )
    usable = budget - RESERVED_BYTES - sizes.vae_encoder
    for_layers_and_captions = usable - sizes.other_text
    text_batch_size = TEXT_BATCH_SIZE
    while (
        text_batch_size > 1
        and for_layers_and_captions - text_batch_size * sizes.caption
        < _PLACES_FOR_STREAMING * sizes.text_layer
    ):
        text_batch_size //= 2
    places = int((for_layers_and_captions - text_batch_size * sizes.caption) // max(1, sizes.text_layer))
    # A graph keeps its memory while the image encoder is on the device. Without graphs, they use the same memory.
    beside_image_encoder = usable - sizes.image_encoder
    is_enough = beside_image_encoder >= FULL_SPEED_BYTES and not for_large_samples
    keeps_graphs = sizes.image_encoder == 0 or is_enough
    return MemoryPlan(
        text="turns" if places >= sizes.num_text_layers else "streamed",
        num_text_layers=min(places, sizes.num_text_layers),
        text_batch_size=text_batch_size,
        pixel_bytes=beside_image_encoder if keeps_graphs else usable,
        num_graphs=1 if keeps_graphs else 0,
    )


def gigabytes(num_bytes: float) -> str:
    """A size for people, rounded up to a tenth: ``gigabytes(2_340_000_000)`` is ``"2.4 GB"``."""
    if math.isinf(num_bytes):
        return "any amount"
    return f"{-(-num_bytes // 100_000_000) / 10:.1f} GB"
