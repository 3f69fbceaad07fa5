"""Public helpers for testing a data path: tiny models in the diffusers layout, small caches, and assertions.

Models and clips need ``latentry[models]`` and ``latentry[encode]``; caches and assertions need the core only.
"""

from latentry.testing.caches import make_image_cache, make_video_cache
from latentry.testing.media import make_counter_clip, read_counter
from latentry.testing.pipelines import make_flux_pipeline, make_hunyuan_pipeline, make_wan_pipeline
from latentry.testing.proofs import assert_resumes, assert_same_cache

__all__ = [
    "assert_resumes",
    "assert_same_cache",
    "make_counter_clip",
    "make_flux_pipeline",
    "make_hunyuan_pipeline",
    "make_image_cache",
    "make_video_cache",
    "make_wan_pipeline",
    "read_counter",
]
