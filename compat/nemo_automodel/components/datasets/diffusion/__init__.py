"""The loader builders, under the names that YAML files give as ``_target_``."""

from latentry.serve.config import (
    build_text_to_image_multiresolution_dataloader,
    build_video_multiresolution_dataloader,
)

__all__ = ["build_text_to_image_multiresolution_dataloader", "build_video_multiresolution_dataloader"]
