"""The image dataset, under the documented name."""

from latentry.serve.dataset import TextToImageDataset

__all__ = ["TextToImageDataset"]
