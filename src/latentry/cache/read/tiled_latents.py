"""HunyuanVideo latents that are larger than their bucket.

That model's VAE, when it encodes in tiles, does not crop the overlap of the tiles from the result: 848x480 pixels give
70x39 positions instead of 53x30. Other tools cached such latents. A model can be trained on them, so they are served as
they are.
"""

from __future__ import annotations

import math
from pathlib import Path

from latentry.cache.format import CacheMetadata
from latentry.cache.read.warn_once import WarnOnce
from latentry.types import HUNYUAN, Bucket, model_family

_SPATIAL_FACTOR = 16


class TiledLatents:
    """Accepts the latents of one cache that are larger than their bucket divided by 16, after one warning.

    Args:
        cache_dir: The cache, for the warning.
        warn_once: Logs the warning.
    """

    def __init__(self, cache_dir: Path, warn_once: WarnOnce) -> None:
        self._cache_dir = cache_dir
        self._warn_once = warn_once

    @classmethod
    def of_cache(cls, cache_dir: Path, metadata: CacheMetadata, warn_once: WarnOnce) -> TiledLatents | None:
        """For a cache of HunyuanVideo; None for other models, whose latents must fit their bucket."""
        model_type = metadata.model_type or metadata.processor or ""
        return cls(cache_dir, warn_once) if model_family(model_type) == HUNYUAN else None

    def accepts(self, width: int, height: int, bucket: Bucket) -> bool:
        """Whether latents of this size are larger than those of the bucket in one direction, and smaller in none."""
        expected = [math.ceil(side / _SPATIAL_FACTOR) for side in bucket.resolution]
        if [width, height] == expected or width < expected[0] or height < expected[1]:
            return False
        self._warn_once(
            "tiled latents",
            "%s: latents of the bucket %s have %dx%d positions instead of %dx%d, as the VAE's tiles give them; they are "
            "served as they are",
            self._cache_dir,
            bucket.folder,
            width,
            height,
            *expected,
        )
        return True
