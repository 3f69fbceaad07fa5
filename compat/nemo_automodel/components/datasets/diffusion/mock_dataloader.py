"""Mock data, under the documented names."""

from latentry.serve.mock import (
    MockWanDataloaderConfig,
    MockWanDataset,
    MockWanDatasetConfig,
    build_mock_dataloader,
)
from latentry.serve.shape_buckets import collate_meta_files as mock_collate_fn

__all__ = [
    "MockWanDataloaderConfig",
    "MockWanDataset",
    "MockWanDatasetConfig",
    "build_mock_dataloader",
    "mock_collate_fn",
]
