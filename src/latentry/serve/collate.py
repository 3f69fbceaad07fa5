"""Collate functions: from samples to the batch that a trainer receives.

A batch that was read as columns is already stacked, and collating it copies nothing. The functions that take a list of
dictionaries stack the tensors, which copies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch

from latentry.cache.read.columns import Columns
from latentry.cache.read.fields import IMAGE_FIELDS, IMAGE_TOKEN_FIELDS, VIDEO_FIELDS
from latentry.cache.read.warn_once import WarnOnce
from latentry.errors import CacheFileError, ConfigError
from latentry.serve.all_captions import pad_captions
from latentry.serve.stacking import stack_fields, stacked

Batch = dict[str, Any]

_IMAGE_TENSORS = ("latent", "crop_resolution", "original_resolution", "crop_offset")
_IMAGE_VALUES = ("prompt", "image_path", "bucket_id", "aspect_ratio")
_IMAGE_TEXT = tuple(
    replace(field, required=False) for field in (*IMAGE_FIELDS.text, *IMAGE_TOKEN_FIELDS.text)
)
_IMAGE_NAMES = frozenset(
    [*_IMAGE_TENSORS, *_IMAGE_VALUES, *(field.name for field in _IMAGE_TEXT), "cache_file"]
)
_VIDEO_NAMES = VIDEO_FIELDS.names | {"bucket_resolution", "cache_file"}
_warn_once = WarnOnce()
"""For batches that are collated without their dataset."""


def collate_fn_production(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """A batch of images with the keys of its samples: tensors stacked, everything else in lists.

    Args:
        batch: Samples of a ``TextToImageDataset``.
    """
    columns = Columns.of_items(batch)
    output = _stack_images(columns)
    output |= _unknown_tensors(columns, _IMAGE_NAMES, output, _warn_once)
    return output | _unknown_values(columns, _IMAGE_NAMES, output, _warn_once)


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


def image_batch(columns: Columns, warn_once: WarnOnce = _warn_once) -> Batch:
    """What ``collate_fn_text_to_image`` returns, from columns.

    Args:
        columns: The samples.
        warn_once: Logs which fields cannot be served.
    """
    images = _stack_images(columns)
    output: Batch = {
        "image_latents": images.pop("latent"),
        "data_type": "image",
        "metadata": {
            "prompts": images.pop("prompt"),
            "image_paths": images.pop("image_path"),
            "bucket_ids": images.pop("bucket_id"),
            "aspect_ratios": images.pop("aspect_ratio"),
            "crop_resolution": images.pop("crop_resolution"),
            "original_resolution": images.pop("original_resolution"),
            "crop_offset": images.pop("crop_offset"),
        },
    }
    if "prompt_embeds" in images:
        output["text_embeddings"] = images.pop("prompt_embeds")
    output |= images
    output |= _unknown_tensors(columns, _IMAGE_NAMES, output, warn_once)
    output["metadata"] |= _unknown_values(columns, _IMAGE_NAMES, output["metadata"], warn_once)
    return output


def video_batch(columns: Columns, warn_once: WarnOnce = _warn_once) -> Batch:
    """What ``collate_fn_video`` returns, from columns.

    Args:
        columns: The samples.
        warn_once: Logs which fields cannot be served.
    """
    _check_not_empty(columns)
    columns = pad_captions(columns, VIDEO_FIELDS.of_captions)
    fields = stack_fields(columns, (VIDEO_FIELDS.latents, *VIDEO_FIELDS.text))
    output: Batch = {name: tensor.flatten(0, 1) for name, tensor in fields.items()}
    output["data_type"] = "video"
    for name, tensor in _unknown_tensors(columns, _VIDEO_NAMES, output, warn_once).items():
        # Video files store tensors with a leading dimension of 1.
        output[name] = tensor.flatten(0, 1) if tensor.ndim > 1 and tensor.shape[1] == 1 else tensor
    if values := _unknown_values(columns, _VIDEO_NAMES, {}, warn_once):
        output["metadata"] = values
    return output


def _stack_images(columns: Columns) -> Batch:
    _check_not_empty(columns)
    columns = pad_captions(columns, _IMAGE_TEXT)
    output: Batch = {key: stacked(columns, key) for key in _IMAGE_TENSORS}
    output |= {key: _listed(columns, key) for key in _IMAGE_VALUES}
    return output | stack_fields(columns, _IMAGE_TEXT)


def _unknown_tensors(
    columns: Columns, known: AbstractSet[str], batch: Batch, warn_once: WarnOnce
) -> dict[str, torch.Tensor]:
    """The tensors that no tool is known to write, stacked. Those that cannot be in the batch are left out."""
    output = {}
    for name in columns.tensors:
        if name in known:
            continue
        shapes = {None if tensor is None else tensor.shape for tensor in columns.tensors[name]}
        if name in batch:
            _warn_left_out(columns, name, "the batch has another field of this name", warn_once)
        elif None in shapes:
            _warn_left_out(columns, name, "not every sample has it as a tensor", warn_once)
        elif len(shapes) > 1:
            _warn_left_out(columns, name, "its shapes differ", warn_once)
        else:
            output[name] = stacked(columns, name)
    return output


def _unknown_values(
    columns: Columns, known: AbstractSet[str], target: Mapping[str, Any], warn_once: WarnOnce
) -> dict[str, list[Any]]:
    """The plain values that no tool is known to write, one per sample."""
    output = {}
    for name, values in columns.values.items():
        if name in known or name in columns.tensors or all(value is None for value in values):
            continue
        if name in target:
            _warn_left_out(columns, name, "the batch has another field of this name", warn_once)
        else:
            output[name] = list(values)
    return output


def _warn_left_out(columns: Columns, name: str, reason: str, warn_once: WarnOnce) -> None:
    warn_once(name, "%s: %s is left out of the batch: %s", columns.describe(0), name, reason)


def _check_not_empty(columns: Columns) -> None:
    if not columns.num_samples:
        raise ConfigError("a batch without samples cannot be collated")


def _listed(columns: Columns, key: str) -> list[Any]:
    """The field's values, which may be tensors."""
    values = columns.values.get(key, columns.tensors.get(key))
    if values is None:
        raise CacheFileError(f"{columns.describe(0)} has no {key}")
    return list(values)
