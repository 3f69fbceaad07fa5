"""The video dataset, under the documented name."""

from latentry.datasets import VIDEO_OPTIONAL_FIELDS, TextToVideoDataset

__all__ = ["VIDEO_OPTIONAL_FIELDS", "TextToVideoDataset"]
