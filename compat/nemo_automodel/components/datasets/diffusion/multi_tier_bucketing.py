"""Resolution buckets, under the documented name."""

from latentry.buckets import MultiTierBucketCalculator, logger

__all__ = ["MultiTierBucketCalculator", "logger"]
