"""The image dataset, under the documented names."""

from latentry.serve.config import TextToImageDatasetConfig
from latentry.serve.dataset import TextToImageDataset

__all__ = ["TextToImageDataset", "TextToImageDatasetConfig"]
