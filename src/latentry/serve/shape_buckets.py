"""Samples that belong to no cache, grouped by the shape of their latents.

A cache groups its samples by the buckets of its rows. Flat folders of files and mock data have no rows. With the groups
made here, the same sampler and the same loader serve them, with the same order, state and resume.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from latentry.buckets import MultiTierBucketCalculator, aspect_name
from latentry.serve.collate import Batch, collate_fn_video
from latentry.serve.loader import LatentDataLoader, LoaderConfig
from latentry.serve.sampler import SequentialBucketSampler

Item = dict[str, Any]


class LatentShape(NamedTuple):
    """The shape of a sample's latents, and the resolution that they stand for."""

    resolution: tuple[int, int]
    """Width and height in pixels."""
    shape: tuple[int, ...]


class ShapeBucketDataset(Dataset[Item]):
    """Video samples, in one bucket for each shape of latents. A subclass defines ``__getitem__`` and ``_shapes``.

    A sample has ``video_latents`` and ``text_embeddings`` with a leading dimension of 1, the optional tensors of its
    model, ``metadata`` and ``file_info``.
    """

    is_packed = False
    has_own_items = True

    def __init__(self) -> None:
        self.calculator = MultiTierBucketCalculator(quantization=8)

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def _shapes(self) -> Sequence[LatentShape]:
        """The shape of each sample."""

    @cached_property
    def bucket_groups(self) -> Mapping[Any, Mapping[str, Any]]:
        """Bucket key to ``indices``, ``resolution``, ``pixels``, ``aspect_name`` and ``aspect_ratio``."""
        members: dict[LatentShape, list[int]] = {}
        for index, found in enumerate(self._shapes()):
            members.setdefault(found, []).append(index)
        groups: dict[Any, dict[str, Any]] = {}
        for found, indices in members.items():
            width, height = found.resolution
            name = aspect_name(width / height)
            groups[name, found.resolution, found.shape] = {
                "indices": indices,
                "resolution": found.resolution,
                "pixels": width * height,
                "aspect_name": name,
                "aspect_ratio": width / height,
            }
        return groups

    @cached_property
    def sorted_bucket_keys(self) -> Sequence[Any]:
        """The keys of ``bucket_groups`` by pixels, ascending."""
        return sorted(self.bucket_groups, key=lambda key: self.bucket_groups[key]["pixels"])

    @abstractmethod
    def _identity(self) -> str:
        """A text that changes with the samples."""

    @property
    def fingerprint(self) -> str:
        """Identifies the samples and their order; a sampler's state holds it."""
        return hashlib.blake2b(self._identity().encode(), digest_size=16).hexdigest()

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Several samples. PyTorch's loaders call this with the indices of a batch."""
        return [self[index] for index in indices]

    def collate_items(self, items: Sequence[Mapping[str, Any]]) -> Batch:
        """The batch of a list of samples.

        Args:
            items: What ``__getitems__`` returned.
        """
        return collate_meta_files(items)


def collate_meta_files(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """The batch of ``collate_fn_video``, with the samples' ``metadata`` and ``file_info`` as lists.

    Args:
        batch: Samples of a ``MetaFilesDataset`` or a ``MockWanDataset``.
    """
    described = {key: [item[key] for item in batch] for key in ("metadata", "file_info") if key in batch[0]}
    tensors = [{key: value for key, value in item.items() if key not in described} for item in batch]
    return {**collate_fn_video(tensors), **described}


def build_shape_bucket_loader(
    dataset: ShapeBucketDataset,
    *,
    batch_size: int,
    dp_rank: int | None,
    dp_world_size: int | None,
    shuffle: bool,
    num_workers: int,
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """A loader over all samples of the dataset, and its sampler. Incomplete batches are kept."""
    config = LoaderConfig(
        batch_size=batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        base_resolution=(512, 512),
        drop_last=False,
        shuffle=shuffle,
        dynamic_batch_size=False,
        num_workers=num_workers,
        pin_memory=False,
        prefetch_factor=2,
        seed=42,
        device=None,
        bucket_order="sequential",
    )
    sampler = SequentialBucketSampler(
        dataset,
        base_batch_size=batch_size,
        drop_last=False,
        shuffle_buckets=shuffle,
        shuffle_within_bucket=shuffle,
        num_replicas=dp_world_size,
        rank=dp_rank,
    )
    return LatentDataLoader(dataset, sampler, None, config), sampler
