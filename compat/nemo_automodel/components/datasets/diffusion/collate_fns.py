"""Collate functions, loader builders and their configurations, under the documented names."""

from latentry.serve.collate import collate_fn_production, collate_fn_text_to_image, collate_fn_video
from latentry.serve.config import (
    TextToImageDataloaderConfig,
    TextToVideoDataloaderConfig,
    build_text_to_image_multiresolution_dataloader,
    build_video_multiresolution_dataloader,
)

__all__ = [
    "TextToImageDataloaderConfig",
    "TextToVideoDataloaderConfig",
    "build_text_to_image_multiresolution_dataloader",
    "build_video_multiresolution_dataloader",
    "collate_fn_production",
    "collate_fn_text_to_image",
    "collate_fn_video",
]
