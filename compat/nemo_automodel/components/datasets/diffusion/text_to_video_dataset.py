"""The video dataset, under the documented names."""

from latentry.serve.config import TextToVideoDatasetConfig
from latentry.serve.dataset import VIDEO_OPTIONAL_FIELDS, TextToVideoDataset

__all__ = ["VIDEO_OPTIONAL_FIELDS", "TextToVideoDataset", "TextToVideoDatasetConfig"]
