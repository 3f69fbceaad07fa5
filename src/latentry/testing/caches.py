"""Small caches of random latents, in the layout that NeMo AutoModel's tool writes. They are made in milliseconds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


def make_image_cache(
    folder: Path, counts: Mapping[tuple[int, int], int], *, shard_size: int = 10_000, channels: int = 4
) -> Path:
    """Make a cache of random image latents: ``make_image_cache(tmp_path, {(512, 512): 10, (576, 448): 3})``.

    Rows of the buckets alternate, as in a folder of mixed images. Prompts are ``sample 0``, ``sample 1``, …
    in the order of the rows.

    Args:
        folder: The folder of the cache, created if missing.
        counts: Samples per bucket, by (width, height).
        shard_size: Rows per metadata shard.
        channels: Channels of the latents.

    Returns:
        The folder.
    """
    rows = []
    for number, (width, height) in enumerate(_alternating(counts)):
        generator = torch.Generator().manual_seed(number)
        common = _common_fields(f"/photos/{number}.jpg", "image_path", width, height, number)
        data = {
            "latent": torch.randn(channels, height // 8, width // 8, generator=generator).half(),
            "clip_tokens": torch.full((1, 5), number),
            "clip_hidden": torch.randn(1, 5, 6, generator=generator).bfloat16(),
            "pooled_prompt_embeds": torch.randn(1, 6, generator=generator).bfloat16(),
            "t5_tokens": torch.full((1, 7), number),
            "prompt_embeds": torch.randn(1, 7, 8, generator=generator).bfloat16(),
            "crop_offset": (0, 0),
            **common,
        }
        rows.append({**common, "cache_file": _save(folder, width, height, number, "pt", data)})
    return write_metadata(folder, rows, shard_size, model_type="flux")


def make_video_cache(
    folder: Path, counts: Mapping[tuple[int, int, int], int], *, shard_size: int = 10_000
) -> Path:
    """Make a cache of random clips: ``make_video_cache(tmp_path, {(832, 480, 17): 4, (832, 480, 9): 2})``.

    Args:
        folder: The folder of the cache, created if missing.
        counts: Samples per bucket, by (width, height, frames).
        shard_size: Rows per metadata shard.

    Returns:
        The folder.
    """
    rows = []
    for number, (width, height, num_frames) in enumerate(_alternating(counts)):
        generator = torch.Generator().manual_seed(number)
        common = _common_fields(f"/clips/{number}.mp4", "video_path", width, height, number)
        common |= {"num_frames": num_frames, "model_type": "wan"}
        latents = torch.randn(1, 4, (num_frames - 1) // 4 + 1, height // 8, width // 8, generator=generator)
        data = {
            "video_latents": latents.half(),
            "text_embeddings": torch.randn(1, 7, 8, generator=generator),
            "text_mask": torch.ones(1, 7, dtype=torch.int64),
            **common,
        }
        rows.append({**common, "cache_file": _save(folder, width, height, number, "meta", data)})
    return write_metadata(folder, rows, shard_size, model_type="wan")


def _alternating(counts: Mapping[Any, int]) -> Iterable[Any]:
    """Each key as often as its count says, in turns."""
    left = {key: count for key, count in counts.items() if count > 0}
    while left:
        for key in list(left):
            yield key
            left[key] -= 1
            if not left[key]:
                del left[key]


def _common_fields(source: str, source_key: str, width: int, height: int, number: int) -> dict[str, Any]:
    return {
        source_key: source,
        "bucket_resolution": (width, height),
        "original_resolution": (2 * width, 2 * height),
        "prompt": f"sample {number}",
        "bucket_id": width // 64,
        "aspect_ratio": width / height,
        "pixels": width * height,
        "model_type": "flux",
    }


def _save(folder: Path, width: int, height: int, number: int, suffix: str, data: dict[str, Any]) -> str:
    name = hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()
    path = folder / f"{width}x{height}" / f"{name}.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(data, path)
    return str(path)


def write_metadata(folder: Path, rows: list[dict[str, Any]], shard_size: int, model_type: str) -> Path:
    """Write the metadata shards of these rows, and ``metadata.json``."""
    shards: list[str] = []
    for start in range(0, len(rows), shard_size):
        shards.append(f"metadata_shard_{len(shards):04d}.json")
        (folder / shards[-1]).write_text(json.dumps(rows[start : start + shard_size], indent=2))
    metadata = {
        "processor": model_type,
        "model_name": "none",
        "model_type": model_type,
        "total_items": len(rows),
        "num_shards": len(shards),
        "shard_size": shard_size,
        "shards": shards,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2))
    return folder
