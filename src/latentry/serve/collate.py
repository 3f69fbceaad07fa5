"""Collate functions: from samples to the batches a trainer receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from latentry.errors import CacheFileError, ConfigError
from latentry.serve.batch import BatchColumns, Item, Items
from latentry.serve.dataset import VIDEO_OPTIONAL_FIELDS

Batch = dict[str, Any]


def collate_fn_production(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """Image samples side by side: tensors stacked, everything else in lists, keys unchanged."""
    columns = _columns(batch)
    tensors = ("latent", "crop_resolution", "original_resolution", "crop_offset")
    texts = ("clip_hidden", "pooled_prompt_embeds", "prompt_embeds", "clip_tokens", "t5_tokens")
    output: Batch = {key: _stacked(columns, key) for key in tensors}
    output |= {key: columns.values[key] for key in ("prompt", "image_path", "bucket_id", "aspect_ratio")}
    output |= {key: _stacked(columns, key) for key in texts if key in columns.tensors}
    return output


def collate_fn_text_to_image(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """Image samples as a trainer's batch: latents and text on top, the rest under ``metadata``."""
    joined = collate_fn_production(batch)
    output: Batch = {
        "image_latents": joined["latent"],
        "data_type": "image",
        "metadata": {
            "prompts": joined["prompt"],
            "image_paths": joined["image_path"],
            "bucket_ids": joined["bucket_id"],
            "aspect_ratios": joined["aspect_ratio"],
            "crop_resolution": joined["crop_resolution"],
            "original_resolution": joined["original_resolution"],
            "crop_offset": joined["crop_offset"],
        },
    }
    if "prompt_embeds" in joined:
        output["text_embeddings"] = joined["prompt_embeds"]
    for key in ("pooled_prompt_embeds", "clip_hidden", "clip_tokens", "t5_tokens"):
        if key in joined:
            output[key] = joined[key]
    return output


def collate_fn_video(batch: Sequence[Mapping[str, Any]], model_type: str = "wan") -> Batch:
    """Video samples as a trainer's batch, joined along their leading dimension.

    Which optional fields there are is the cache's to say; ``model_type`` is taken because callers
    of the documented interface pass it.
    """
    columns = _columns(batch)
    output: Batch = {
        "video_latents": _stacked(columns, "video_latents").flatten(0, 1),
        "text_embeddings": _stacked(columns, "text_embeddings").flatten(0, 1),
        "data_type": "video",
    }
    for key in VIDEO_OPTIONAL_FIELDS:
        if key in columns.tensors:
            output[key] = _stacked(columns, key).flatten(0, 1)
    return output


def _columns(batch: Sequence[Mapping[str, Any]]) -> BatchColumns:
    """A batch by column: as it was read, or from items that somebody has made or may have changed."""
    if not len(batch):
        raise ConfigError("a batch without samples cannot be collated")
    if isinstance(batch, Items) and batch.columns is not None:
        return batch.columns
    columns = {key: [item.get(key) for item in batch] for key in dict.fromkeys(chain.from_iterable(batch))}
    return BatchColumns(columns, columns, lambda i: _where(batch[i]))


def _where(item: Mapping[str, Any]) -> str:
    return item.where if isinstance(item, Item) else str(item.get("cache_file", "a sample"))


def _stacked(columns: BatchColumns, key: str) -> torch.Tensor:
    """The tensors of all samples, which must be alike."""
    column = columns.tensors.get(key, [])
    if isinstance(column, torch.Tensor):
        return column
    tensors = [tensor for tensor in column if tensor is not None]
    if not tensors:
        raise CacheFileError(f"{columns.where(0)} has no {key}")
    like, first = tensors[0], next(i for i, tensor in enumerate(column) if tensor is not None)
    for i, tensor in enumerate(column):
        if tensor is None or tensor.shape != like.shape:
            found = "absent" if tensor is None else f"{list(tensor.shape)}"
            raise CacheFileError(
                f"{columns.where(i)}: {key} is {found}, but {list(like.shape)} in {columns.where(first)} of the same "
                "bucket; a batch must stack"
            )
    return torch.stack(tensors)
