"""Datasets, samplers, collate functions and loader builders, under the names that NeMo AutoModel exports."""

from latentry.buckets import MultiTierBucketCalculator
from latentry.serve.collate import collate_fn_production, collate_fn_text_to_image, collate_fn_video
from latentry.serve.config import (
    build_text_to_image_multiresolution_dataloader,
    build_video_multiresolution_dataloader,
)
from latentry.serve.dataset import (
    VIDEO_OPTIONAL_FIELDS,
    BaseMultiresolutionDataset,
    TextToImageDataset,
    TextToVideoDataset,
)
from latentry.serve.meta_files import MetaFilesDataset, build_dataloader
from latentry.serve.mock import build_mock_dataloader
from latentry.serve.sampler import SequentialBucketSampler

__all__ = [
    "VIDEO_OPTIONAL_FIELDS",
    "BaseMultiresolutionDataset",
    "MetaFilesDataset",
    "MultiTierBucketCalculator",
    "SequentialBucketSampler",
    "TextToImageDataset",
    "TextToVideoDataset",
    "build_dataloader",
    "build_mock_dataloader",
    "build_text_to_image_multiresolution_dataloader",
    "build_video_multiresolution_dataloader",
    "collate_fn_production",
    "collate_fn_text_to_image",
    "collate_fn_video",
]
