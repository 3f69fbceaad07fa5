"""The base class of datasets, under the documented name."""

from latentry.serve.dataset import BaseMultiresolutionDataset

__all__ = ["BaseMultiresolutionDataset"]
