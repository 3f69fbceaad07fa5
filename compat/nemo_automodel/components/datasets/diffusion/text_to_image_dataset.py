"""The image dataset, under the documented name."""

from latentry.datasets import TextToImageDataset

__all__ = ["TextToImageDataset"]
