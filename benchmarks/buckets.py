"""Time to assign buckets to arrays of image sizes, compared with one call per image.

python benchmarks/buckets.py
"""

from __future__ import annotations

import time

import numpy as np

from latentry.buckets import MultiTierBucketCalculator

NUM_IMAGES = 20_000_000
ONE_BY_ONE = 200_000


def main() -> None:
    rng = np.random.default_rng(0)
    widths, heights = (rng.integers(64, 8000, NUM_IMAGES, dtype=np.int32) for _ in range(2))
    for preset, quantization in (("256p", 64), ("1024p", 64), ("1536p", 8)):
        calculator = MultiTierBucketCalculator.from_preset(preset, quantization)
        calculator.assign(widths, heights)
        start = time.perf_counter()
        ids = calculator.assign(widths, heights)
        rate = NUM_IMAGES / (time.perf_counter() - start)
        pairs = list(zip(widths[:ONE_BY_ONE].tolist(), heights[:ONE_BY_ONE].tolist(), strict=True))
        start = time.perf_counter()
        singly = [
            min(calculator.buckets, key=lambda b: abs(b["aspect_ratio"] - w / h))["id"] for w, h in pairs
        ]
        plain_rate = ONE_BY_ONE / (time.perf_counter() - start)
        assert ids[:ONE_BY_ONE].tolist() == singly
        print(
            f"{preset} on a grid of {quantization:2d}, {len(calculator.buckets):2d} buckets: "
            f"{rate / 1e6:5.1f} million images/s, {rate / plain_rate:,.0f}x a plain min() per image"
        )


if __name__ == "__main__":
    main()
