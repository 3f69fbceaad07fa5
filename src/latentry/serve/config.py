"""The functions that build a loader, and the same as configuration dataclasses for training recipes of other tools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from latentry.serve.dataloader_build import DiffusionDataloaderBuild
from latentry.serve.dataset import BaseMultiresolutionDataset, TextToImageDataset, TextToVideoDataset
from latentry.serve.loader import LatentDataLoader, LoaderConfig
from latentry.serve.sampler import SequentialBucketSampler


def build_text_to_image_multiresolution_dataloader(
    *,
    cache_dir: str | os.PathLike[str],
    train_text_encoder: bool = False,
    batch_size: int = 1,
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    base_resolution: Sequence[int] = (256, 256),
    drop_last: bool = True,
    shuffle: bool = True,
    dynamic_batch_size: bool = False,
    num_workers: int = 4,
    pin_memory: bool = True,
    prefetch_factor: int = 2,
    seed: int = 42,
    device: str | torch.device | None = None,
    bucket_order: str = "sequential",
    caption_choice: str = "random",
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """Build a loader over an image cache. Returns the loader and its sampler.

    >>> loader, sampler = build_text_to_image_multiresolution_dataloader(cache_dir="cache", batch_size=8)

    Args:
        cache_dir: The folder of a finished image cache.
        train_text_encoder: Serve token ids (``clip_tokens``, ``t5_tokens``) instead of embeddings.
        batch_size: Samples per batch and rank; with ``dynamic_batch_size`` the number at ``base_resolution``.
        dp_rank: This data-parallel rank. By default the rank of ``torch.distributed``, or 0.
        dp_world_size: The number of data-parallel ranks. By default the world size of ``torch.distributed``, or 1.
        base_resolution: Width and height that ``batch_size`` is meant for.
        drop_last: Leave out the incomplete batch at the end of each bucket.
        shuffle: Permute the buckets and the samples of each bucket, differently in every epoch.
        dynamic_batch_size: Scale batch sizes so that all batches have about the same number of pixels.
        num_workers: Threads that prefetch batches. 0 reads each batch when it is requested.
        pin_memory: Read batches into pinned memory, for faster copies to a GPU. Ignored without CUDA.
        prefetch_factor: Batches that are prefetched per worker thread.
        seed: Seed of the permutations.
        device: Where batches are moved before the trainer gets them. By default they stay in main memory.
        bucket_order: ``sequential`` finishes a bucket before the next one. ``interleaved`` mixes the buckets.
        caption_choice: Which caption of several a sample has: ``random`` draws one for each epoch, ``first`` is
            always the same, and ``all`` adds a caption dimension to the text tensors.
    """
    return _build(
        TextToImageDataset(cache_dir, train_text_encoder=train_text_encoder, caption_choice=caption_choice),
        LoaderConfig(
            batch_size=batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            base_resolution=base_resolution,
            drop_last=drop_last,
            shuffle=shuffle,
            dynamic_batch_size=dynamic_batch_size,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            seed=seed,
            device=device,
            bucket_order=bucket_order,
        ),
    )


def build_video_multiresolution_dataloader(
    *,
    cache_dir: str | os.PathLike[str],
    model_type: str = "wan",
    device: str | torch.device | None = None,
    batch_size: int = 1,
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    base_resolution: Sequence[int] = (512, 512),
    drop_last: bool = True,
    shuffle: bool = True,
    dynamic_batch_size: bool = False,
    num_workers: int = 2,
    pin_memory: bool = True,
    prefetch_factor: int = 2,
    seed: int = 42,
    bucket_order: str = "sequential",
    caption_choice: str = "random",
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """Build a loader over a video cache. Returns the loader and its sampler.

    >>> loader, sampler = build_video_multiresolution_dataloader(cache_dir="cache", model_type="wan")

    Args:
        cache_dir: The folder of a finished video cache.
        model_type: The model that is trained, such as ``wan`` or ``hunyuan``. A warning is logged if the cache was
            made for another one.
        device: Where batches are moved before the trainer gets them. By default they stay in main memory.
        batch_size: Samples per batch and rank; with ``dynamic_batch_size`` the number at ``base_resolution``.
        dp_rank: This data-parallel rank. By default the rank of ``torch.distributed``, or 0.
        dp_world_size: The number of data-parallel ranks. By default the world size of ``torch.distributed``, or 1.
        base_resolution: Width and height that ``batch_size`` is meant for.
        drop_last: Leave out the incomplete batch at the end of each bucket.
        shuffle: Permute the buckets and the samples of each bucket, differently in every epoch.
        dynamic_batch_size: Scale batch sizes so that all batches have about the same number of pixels per frame.
        num_workers: Threads that prefetch batches. 0 reads each batch when it is requested.
        pin_memory: Read batches into pinned memory, for faster copies to a GPU. Ignored without CUDA.
        prefetch_factor: Batches that are prefetched per worker thread.
        seed: Seed of the permutations.
        bucket_order: ``sequential`` finishes a bucket before the next one. ``interleaved`` mixes the buckets.
        caption_choice: Which caption of several a sample has: ``random`` draws one for each epoch, ``first`` is
            always the same, and ``all`` adds a caption dimension to the text tensors.
    """
    return _build(
        TextToVideoDataset(cache_dir, model_type=model_type, caption_choice=caption_choice),
        LoaderConfig(
            batch_size=batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            base_resolution=base_resolution,
            drop_last=drop_last,
            shuffle=shuffle,
            dynamic_batch_size=dynamic_batch_size,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            seed=seed,
            device=device,
            bucket_order=bucket_order,
        ),
    )


def _build(
    dataset: BaseMultiresolutionDataset, config: LoaderConfig
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    width, height = config.base_resolution
    sampler = SequentialBucketSampler(
        dataset,
        base_batch_size=config.batch_size,
        base_resolution=(int(width), int(height)),
        drop_last=config.drop_last,
        shuffle_buckets=config.shuffle,
        shuffle_within_bucket=config.shuffle,
        dynamic_batch_size=config.dynamic_batch_size,
        seed=config.seed,
        num_replicas=config.dp_world_size,
        rank=config.dp_rank,
        bucket_order=config.bucket_order,
    )
    return LatentDataLoader(dataset, sampler, None, config), sampler


# ---- configurations -------------------------------------------------------------------------


def _fields_of(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


@dataclass(frozen=True, slots=True)
class TextToImageDatasetConfig:
    """The parameters of a ``TextToImageDataset``."""

    cache_dir: str
    """The folder of a finished image cache."""
    train_text_encoder: bool = False
    """Serve token ids instead of embeddings."""
    caption_choice: str = "random"
    """Which caption of a sample that has several: ``random``, ``first`` or ``all``."""

    def build(self) -> TextToImageDataset:
        """Build the dataset."""
        return TextToImageDataset(**_fields_of(self))


@dataclass(frozen=True, slots=True)
class TextToVideoDatasetConfig:
    """The parameters of a ``TextToVideoDataset``."""

    cache_dir: str
    """The folder of a finished video cache."""
    model_type: str = "wan"
    """The model that is trained. A warning is logged if the cache was made for another one."""
    device: str = "cpu"
    """Where the tensors are put."""
    caption_choice: str = "random"
    """Which caption of a sample that has several: ``random``, ``first`` or ``all``."""

    def build(self) -> TextToVideoDataset:
        """Build the dataset."""
        return TextToVideoDataset(**_fields_of(self))


@dataclass(frozen=True, slots=True)
class TextToImageDataloaderConfig:
    """A loader over an image cache, for training recipes that build their loader from a dataclass.

    >>> build = TextToImageDataloaderConfig("cache").build(dp_rank=0, dp_world_size=1, batch_size=8)
    >>> for batch in build.dataloader: ...

    The fields are the parameters of ``build_text_to_image_multiresolution_dataloader``.
    """

    cache_dir: str
    """The folder of a finished image cache."""
    train_text_encoder: bool = False
    """Serve token ids instead of embeddings."""
    base_resolution: Sequence[int] = (256, 256)
    """Width and height that the batch size is meant for."""
    drop_last: bool = True
    """Leave out the incomplete batch at the end of each bucket."""
    shuffle: bool = True
    """Permute the buckets and the samples of each bucket, differently in every epoch."""
    dynamic_batch_size: bool = False
    """Scale batch sizes so that all batches have about the same number of pixels."""
    num_workers: int = 4
    """Threads that prefetch batches; 0 reads each batch when it is requested."""
    pin_memory: bool = True
    """Read batches into pinned memory; ignored without CUDA."""
    prefetch_factor: int = 2
    """Batches that are prefetched per worker thread."""
    seed: int = 42
    """Seed of the permutations."""
    bucket_order: str = "sequential"
    """``sequential`` finishes a bucket before the next one; ``interleaved`` mixes the buckets."""
    caption_choice: str = "random"
    """Which caption of several a sample has: ``random``, ``first`` or ``all``."""

    def build(
        self, *, dp_rank: int | None, dp_world_size: int | None, batch_size: int
    ) -> DiffusionDataloaderBuild:
        """Build the loader of one rank.

        Args:
            dp_rank: This data-parallel rank. None is the rank of ``torch.distributed``, or 0.
            dp_world_size: The number of data-parallel ranks. None is the world size of ``torch.distributed``, or 1.
            batch_size: Samples per batch and rank; with ``dynamic_batch_size`` the number at ``base_resolution``.
        """
        loader, sampler = build_text_to_image_multiresolution_dataloader(
            **_fields_of(self), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=batch_size
        )
        return DiffusionDataloaderBuild(loader, sampler, self.drop_last)


@dataclass(frozen=True, slots=True)
class TextToVideoDataloaderConfig:
    """A loader over a video cache, for training recipes that build their loader from a dataclass.

    The fields are the parameters of ``build_video_multiresolution_dataloader``.
    """

    cache_dir: str
    """The folder of a finished video cache."""
    model_type: str = "wan"
    """The model that is trained. A warning is logged if the cache was made for another one."""
    device: str = "cpu"
    """Where the tensors are put."""
    base_resolution: Sequence[int] = (512, 512)
    """Width and height that the batch size is meant for."""
    drop_last: bool = True
    """Leave out the incomplete batch at the end of each bucket."""
    shuffle: bool = True
    """Permute the buckets and the samples of each bucket, differently in every epoch."""
    dynamic_batch_size: bool = False
    """Scale batch sizes so that all batches have about the same number of pixels."""
    num_workers: int = 2
    """Threads that prefetch batches; 0 reads each batch when it is requested."""
    pin_memory: bool = True
    """Read batches into pinned memory; ignored without CUDA."""
    prefetch_factor: int = 2
    """Batches that are prefetched per worker thread."""
    seed: int = 42
    """Seed of the permutations."""
    bucket_order: str = "sequential"
    """``sequential`` finishes a bucket before the next one; ``interleaved`` mixes the buckets."""
    caption_choice: str = "random"
    """Which caption of several a sample has: ``random``, ``first`` or ``all``."""

    def build(
        self, *, dp_rank: int | None, dp_world_size: int | None, batch_size: int
    ) -> DiffusionDataloaderBuild:
        """Build the loader of one rank.

        Args:
            dp_rank: This data-parallel rank. None is the rank of ``torch.distributed``, or 0.
            dp_world_size: The number of data-parallel ranks. None is the world size of ``torch.distributed``, or 1.
            batch_size: Samples per batch and rank; with ``dynamic_batch_size`` the number at ``base_resolution``.
        """
        loader, sampler = build_video_multiresolution_dataloader(
            **_fields_of(self), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=batch_size
        )
        return DiffusionDataloaderBuild(loader, sampler, self.drop_last)
