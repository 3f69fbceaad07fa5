"""Flat folders of ``.meta`` files, under the documented names."""

from latentry.serve.meta_files import (
    MetaFilesDataloaderConfig,
    MetaFilesDataset,
    MetaFilesDatasetConfig,
    build_dataloader,
)
from latentry.serve.shape_buckets import collate_meta_files as collate_fn

__all__ = [
    "MetaFilesDataloaderConfig",
    "MetaFilesDataset",
    "MetaFilesDatasetConfig",
    "build_dataloader",
    "collate_fn",
]
