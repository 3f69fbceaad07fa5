"""Collate functions: from samples to the batch that a trainer receives.

A batch that was read as columns is already stacked, and collating it copies nothing. The functions that take a list of
dictionaries stack the tensors, which copies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from latentry.cache.read.columns import Columns
from latentry.cache.read.fields import VIDEO_FIELDS
from latentry.errors import CacheFileError, ConfigError
from latentry.serve.all_captions import NUM_CAPTIONS, pad_captions

Batch = dict[str, Any]

_IMAGE_TENSORS = ("latent", "crop_resolution", "original_resolution", "crop_offset")
_IMAGE_VALUES = ("prompt", "image_path", "bucket_id", "aspect_ratio")
_IMAGE_TEXT = (
    "clip_hidden",
    "pooled_prompt_embeds",
    "prompt_embeds",
    "clip_tokens",
    "t5_tokens",
    NUM_CAPTIONS,
)


def collate_fn_production(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """A batch of images with the keys of its samples: tensors stacked, everything else in lists.

    Args:
        batch: Samples of a ``TextToImageDataset``.
    """
    return _stack_images(Columns.of_items(batch))


def collate_fn_text_to_image(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """A batch of images as a trainer receives it: latents and text on top, the rest under ``metadata``.

    Args:
        batch: Samples of a ``TextToImageDataset``.
    """
    return image_batch(Columns.of_items(batch))


def collate_fn_video(batch: Sequence[Mapping[str, Any]], model_type: str = "wan") -> Batch:
    """A batch of videos as a trainer receives it, joined along the leading dimension of its samples.

    Args:
        batch: Samples of a ``TextToVideoDataset``.
        model_type: Accepted because the documented interface has it. The fields that the samples have decide which
            optional fields the batch has.
    """
    return video_batch(Columns.of_items(batch))


def image_batch(columns: Columns) -> Batch:
    """What ``collate_fn_text_to_image`` returns, from columns."""
    stacked = _stack_images(columns)
    output: Batch = {
        "image_latents": stacked["latent"],
        "data_type": "image",
        "metadata": {
            "prompts": stacked["prompt"],
            "image_paths": stacked["image_path"],
            "bucket_ids": stacked["bucket_id"],
            "aspect_ratios": stacked["aspect_ratio"],
            "crop_resolution": stacked["crop_resolution"],
            "original_resolution": stacked["original_resolution"],
            "crop_offset": stacked["crop_offset"],
        },
    }
    if "prompt_embeds" in stacked:
        output["text_embeddings"] = stacked["prompt_embeds"]
    for key in ("pooled_prompt_embeds", "clip_hidden", "clip_tokens", "t5_tokens", NUM_CAPTIONS):
        if key in stacked:
            output[key] = stacked[key]
    return output


def video_batch(columns: Columns) -> Batch:
    """What ``collate_fn_video`` returns, from columns."""
    _check_not_empty(columns)
    columns = pad_captions(columns)
    output: Batch = {
        "video_latents": _stacked(columns, "video_latents").flatten(0, 1),
        "text_embeddings": _stacked(columns, "text_embeddings").flatten(0, 1),
        "data_type": "video",
    }
    for field in VIDEO_FIELDS.text:
        if not field.required and field.name in columns.tensors:
            output[field.name] = _stacked(columns, field.name).flatten(0, 1)
    if NUM_CAPTIONS in columns.tensors:
        output[NUM_CAPTIONS] = _stacked(columns, NUM_CAPTIONS)
    return output


def _stack_images(columns: Columns) -> Batch:
    _check_not_empty(columns)
    columns = pad_captions(columns)
    output: Batch = {key: _stacked(columns, key) for key in _IMAGE_TENSORS}
    output |= {key: _listed(columns, key) for key in _IMAGE_VALUES}
    output |= {key: _stacked(columns, key) for key in _IMAGE_TEXT if key in columns.tensors}
    return output


def _check_not_empty(columns: Columns) -> None:
    if not columns.num_samples:
        raise ConfigError("a batch without samples cannot be collated")


def _listed(columns: Columns, key: str) -> list[Any]:
    """The field's values, which may be tensors."""
    values = columns.values.get(key, columns.tensors.get(key))
    if values is None:
        raise CacheFileError(f"{columns.describe(0)} has no {key}")
    return list(values)


def _stacked(columns: Columns, key: str) -> torch.Tensor:
    """The field's tensors, which must all have the same shape."""
    column = columns.tensors.get(key)
    if isinstance(column, torch.Tensor):
        return column
    present = [(i, tensor) for i, tensor in enumerate(column or ()) if tensor is not None]
    if not present:
        raise CacheFileError(f"{columns.describe(0)} has no {key}")
    first, like = present[0]
    for i, tensor in enumerate(column or ()):
        if tensor is None or tensor.shape != like.shape:
            found = "missing" if tensor is None else f"{list(tensor.shape)}"
            raise CacheFileError(
                f"{columns.describe(i)}: {key} is {found}, but {list(like.shape)} in {columns.describe(first)}; "
                "all samples of a batch must have the same shape"
            )
    return torch.stack([tensor for _, tensor in present])
