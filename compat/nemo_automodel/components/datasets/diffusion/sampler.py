"""The bucket sampler, under the documented name."""

from latentry.serve.sampler import SequentialBucketSampler, logger

__all__ = ["SequentialBucketSampler", "logger"]
