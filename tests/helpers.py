"""What several tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from latentry.buckets import MultiTierBucketCalculator
from latentry.encode.prepare import Progress
from latentry.processors.fused.clip import ClipEncoder
from latentry.processors.fused.hunyuan_vae import HunyuanEncoder
from latentry.processors.fused.image_vae import ImageEncoder
from latentry.processors.fused.t5 import T5Encoder
from latentry.processors.fused.wan_vae import WanEncoder

DATA = Path(__file__).parent / "data"
EXAMPLES = Path(__file__).parents[1] / "examples" / "pictures"

FUSED_ENCODERS = {
    "image_vae": ImageEncoder,
    "wan_vae": WanEncoder,
    "hunyuan_vae": HunyuanEncoder,
    "t5": T5Encoder,
    "umt5": T5Encoder,
    "clip": ClipEncoder,
}
"""The fused encoder for each tiny model that the ``load_model`` fixture of ``tests/processors`` knows."""


def golden(name: str) -> list[dict[str, Any]]:
    return json.loads((DATA / name).read_text())


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def assert_same_items(first, second) -> None:
    assert first.keys() == second.keys()
    for key in first.keys() - {"cache_file"}:
        if isinstance(first[key], torch.Tensor):
            assert first[key].dtype == second[key].dtype, key
            assert torch.equal(first[key], second[key]), key
        elif isinstance(first[key], dict):
            assert_same_items(first[key], second[key])
        else:
            assert first[key] == second[key], key


def stopped_after(count: int) -> Callable[[Progress], None]:
    """A progress callback that interrupts the run once so many samples are encoded."""
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        if progress.phase == "encode":
            seen.append(progress)
            if len(seen) > count:
                raise KeyboardInterrupt

    return stop


def bucketed(buckets: list[tuple[tuple[int, int], Any]]) -> SimpleNamespace:
    """The least a sampler asks for: buckets in sorted order as (resolution, indices)."""
    groups = {
        ("any", tuple(resolution)): {
            "indices": indices,
            "resolution": tuple(resolution),
            "pixels": resolution[0] * resolution[1],
            "aspect_name": "any",
        }
        for resolution, indices in buckets
    }
    return SimpleNamespace(
        sorted_bucket_keys=list(groups), bucket_groups=groups, calculator=MultiTierBucketCalculator()
    )


def sized(*sizes: int) -> SimpleNamespace:
    """Buckets of these sizes over consecutive indices."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return bucketed(
        [((64 * (i + 1), 64), range(s, s + n)) for i, (s, n) in enumerate(zip(starts, sizes, strict=True))]
    )
