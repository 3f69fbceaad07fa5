"""What a dataloader configuration builds: the contract with training recipes of other tools.

A recipe instantiates the dataclass that its YAML names as ``_target_``, calls ``build`` with the rank, the number of
ranks and the batch size, and trains on the result. It needs nothing else of Latentry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from latentry.serve.loader import LatentDataLoader
from latentry.serve.sampler import SequentialBucketSampler


@dataclass(frozen=True, slots=True)
class DiffusionDataloaderBuild:
    """A loader and its sampler. Both have ``state_dict`` and ``load_state_dict``; it is enough to save one of them."""

    dataloader: LatentDataLoader
    """The batches of this rank."""
    sampler: SequentialBucketSampler
    """Their order; the loader's ``batch_sampler``."""
    drop_last: bool = False
    """Whether incomplete batches are left out."""


class DiffusionDataloaderConfig(Protocol):
    """What a training recipe needs of a dataloader configuration."""

    def build(
        self, *, dp_rank: int | None, dp_world_size: int | None, batch_size: int
    ) -> DiffusionDataloaderBuild:
        """Build the loader of one rank.

        Args:
            dp_rank: This data-parallel rank. None is the rank of ``torch.distributed``, or 0.
            dp_world_size: The number of data-parallel ranks. None is the world size of ``torch.distributed``, or 1.
            batch_size: Samples per batch and rank.
        """
