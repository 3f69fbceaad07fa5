"""The base class of datasets, under the documented name."""

from latentry.datasets import BaseMultiresolutionDataset

__all__ = ["BaseMultiresolutionDataset"]
