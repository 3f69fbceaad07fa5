"""The video dataset, under the documented name."""

from latentry.serve.dataset import VIDEO_OPTIONAL_FIELDS, TextToVideoDataset

__all__ = ["VIDEO_OPTIONAL_FIELDS", "TextToVideoDataset"]
