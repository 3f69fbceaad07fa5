"""``verify_cache()``: the checks of a finished cache, and the comparison of decoded latents with their inputs.

The checks need only the core packages. Decoding needs the cache's model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from latentry.cache.format import read_metadata
from latentry.cache.verify import VerifyResult, check_cache
from latentry.processors import PROCESSORS, canonical_name, processor_class


def verify_cache(
    cache_dir: str | os.PathLike[str],
    *,
    decode: bool = False,
    device: str = "auto",
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> VerifyResult:
    """Check every sample of a cache of any kind.

    >>> print(verify_cache("cache"))
    12 samples, 0 problems in cache

    Args:
        cache_dir: A finished cache, written by Latentry or by NeMo AutoModel.
        decode: Load the cache's model, decode each latent, and compare it with its input.
        device: Where to decode: ``auto`` (a GPU if there is one), ``cpu``, ``cuda:0``, ``xpu:0`` or ``mps``.
        on_progress: Called with the number of checked samples and the number of all samples.
    """
    folder = Path(cache_dir).expanduser().absolute()
    metadata = read_metadata(folder)
    frame_step = None
    if metadata.processor is not None and canonical_name(metadata.processor) in PROCESSORS:
        frame_step = processor_class(metadata.processor).info.temporal_factor
    compare = None
    if decode:
        from latentry.encode.decode_check import DecodeCheck

        compare = DecodeCheck(folder, metadata, device).psnr_db
    return check_cache(folder, frame_step=frame_step, compare=compare, on_progress=on_progress)
