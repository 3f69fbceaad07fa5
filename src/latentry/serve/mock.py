"""Mock data with the shapes of Wan 2.1, to test a training script without a cache.

A sample is random but fixed: the same index gives the same numbers in every process and on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import torch

from latentry.errors import ConfigError
from latentry.seeds import derived_seed
from latentry.serve.dataloader_build import DiffusionDataloaderBuild
from latentry.serve.loader import LatentDataLoader
from latentry.serve.sampler import SequentialBucketSampler
from latentry.serve.shape_buckets import Item, LatentShape, ShapeBucketDataset, build_shape_bucket_loader

_SPATIAL_FACTOR = 8


class MockWanDataset(ShapeBucketDataset):
    """Random float32 samples with the shapes of Wan 2.1.

    >>> MockWanDataset(length=2)[0]["video_latents"].shape
    torch.Size([1, 16, 16, 30, 52])

    Args:
        length: The number of samples.
        num_channels: Channels of the latents.
        num_frame_latents: Frames of the latents.
        spatial_h: Height of the latents.
        spatial_w: Width of the latents.
        text_seq_len: Positions of a text embedding.
        text_embed_dim: Width of a text embedding.
        device: Where the tensors are put.
    """

    def __init__(
        self,
        length: int = 1024,
        num_channels: int = 16,
        num_frame_latents: int = 16,
        spatial_h: int = 30,
        spatial_w: int = 52,
        text_seq_len: int = 77,
        text_embed_dim: int = 4096,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        self.length = length
        self.device = device
        self._latents = (1, num_channels, num_frame_latents, spatial_h, spatial_w)
        self._text = (1, text_seq_len, text_embed_dim)
        for size in (length, *self._latents, *self._text):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(
                    f"a size of the mock data is {size!r}; it must be a whole number, at least 1"
                )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Item:
        index = range(self.length)[index]
        generator = torch.Generator().manual_seed(derived_seed("mock", index))
        return {
            "video_latents": torch.randn(self._latents, generator=generator).to(self.device),
            "text_embeddings": torch.randn(self._text, generator=generator).to(self.device),
            "metadata": {"prompt": f"mock sample {index}"},
            "file_info": {"meta_filename": f"mock_{index:06d}.meta"},
        }

    def _shapes(self) -> Sequence[LatentShape]:
        *_, height, width = self._latents
        return [LatentShape((width * _SPATIAL_FACTOR, height * _SPATIAL_FACTOR), self._latents)] * self.length

    def _identity(self) -> str:
        return f"mock {self.length} {self._latents} {self._text}"


@dataclass(frozen=True, slots=True)
class MockWanDatasetConfig:
    """The parameters of a ``MockWanDataset``."""

    length: int = 1024
    """The number of samples."""
    num_channels: int = 16
    """Channels of the latents."""
    num_frame_latents: int = 16
    """Frames of the latents."""
    spatial_h: int = 30
    """Height of the latents."""
    spatial_w: int = 52
    """Width of the latents."""
    text_seq_len: int = 77
    """Positions of a text embedding."""
    text_embed_dim: int = 4096
    """Width of a text embedding."""
    device: str = "cpu"
    """Where the tensors are put."""

    def build(self) -> MockWanDataset:
        """Build the dataset."""
        return MockWanDataset(**asdict(self))


@dataclass(frozen=True, slots=True)
class MockWanDataloaderConfig:
    """A loader over mock data.

    >>> build = MockWanDataloaderConfig(length=64).build(dp_rank=0, dp_world_size=1, batch_size=2)
    >>> next(iter(build.dataloader))["video_latents"].shape
    torch.Size([2, 16, 16, 30, 52])
    """

    num_workers: int = 0
    """Threads that prefetch batches; 0 makes each batch when it is requested."""
    device: str = "cpu"
    """Where the tensors are put."""
    length: int = 1024
    """The number of samples."""
    num_channels: int = 16
    """Channels of the latents."""
    num_frame_latents: int = 16
    """Frames of the latents."""
    spatial_h: int = 30
    """Height of the latents."""
    spatial_w: int = 52
    """Width of the latents."""
    text_seq_len: int = 77
    """Positions of a text embedding."""
    text_embed_dim: int = 4096
    """Width of a text embedding."""
    shuffle: bool = True
    """Permute the samples, differently in every epoch."""

    @property
    def dataset(self) -> MockWanDatasetConfig:
        """The configuration of the loader's dataset."""
        return MockWanDatasetConfig(**{f.name: getattr(self, f.name) for f in fields(MockWanDatasetConfig)})

    def build(
        self, *, dp_rank: int | None, dp_world_size: int | None, batch_size: int
    ) -> DiffusionDataloaderBuild:
        """Build the loader of one rank.

        Args:
            dp_rank: This data-parallel rank. None is the rank of ``torch.distributed``, or 0.
            dp_world_size: The number of data-parallel ranks. None is the world size of ``torch.distributed``, or 1.
            batch_size: Samples per batch and rank.
        """
        loader, sampler = build_shape_bucket_loader(
            self.dataset.build(),
            batch_size=batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            shuffle=self.shuffle,
            num_workers=self.num_workers,
        )
        return DiffusionDataloaderBuild(loader, sampler)


def build_mock_dataloader(
    *,
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    batch_size: int = 1,
    num_workers: int = 0,
    device: str = "cpu",
    length: int = 1024,
    num_channels: int = 16,
    num_frame_latents: int = 16,
    spatial_h: int = 30,
    spatial_w: int = 52,
    text_seq_len: int = 77,
    text_embed_dim: int = 4096,
    shuffle: bool = True,
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """Build a loader over mock data. Returns the loader and its sampler.

    >>> loader, sampler = build_mock_dataloader(length=64, batch_size=2)

    Args:
        dp_rank: This data-parallel rank. By default the rank of ``torch.distributed``, or 0.
        dp_world_size: The number of data-parallel ranks. By default the world size of ``torch.distributed``, or 1.
        batch_size: Samples per batch and rank.
        num_workers: Threads that prefetch batches. 0 makes each batch when it is requested.
        device: Where the tensors are put.
        length: The number of samples.
        num_channels: Channels of the latents.
        num_frame_latents: Frames of the latents.
        spatial_h: Height of the latents.
        spatial_w: Width of the latents.
        text_seq_len: Positions of a text embedding.
        text_embed_dim: Width of a text embedding.
        shuffle: Permute the samples, differently in every epoch.
    """
    config = MockWanDataloaderConfig(
        num_workers=num_workers,
        device=device,
        length=length,
        num_channels=num_channels,
        num_frame_latents=num_frame_latents,
        spatial_h=spatial_h,
        spatial_w=spatial_w,
        text_seq_len=text_seq_len,
        text_embed_dim=text_embed_dim,
        shuffle=shuffle,
    )
    built = config.build(dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=batch_size)
    return built.dataloader, built.sampler
