"""Serving a cache to a trainer: order, sampler, datasets, loader."""
