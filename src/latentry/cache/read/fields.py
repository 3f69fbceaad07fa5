"""Which fields image and video files have, and which of them are served.

Fields of a file that are not listed here are served as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from latentry.cache.packed_format import part_of
from latentry.cache.read.pickle_reader import TensorLocation


@dataclass(frozen=True, slots=True)
class TensorField:
    """A tensor that cache files hold."""

    name: str
    num_dims: int
    """Dimensions of one sample's tensor. Files may store one more, a leading dimension of 1."""
    required: bool = True
    padding: Padding | None = None
    """How samples of different lengths are put into one batch; None if they cannot be."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Zeros at the end of one dimension, so that all samples of a batch have the same length."""

    mask: str
    """The name of the mask that says which positions are the sample's own."""
    dim: int = -2
    """The dimension, counted from the last."""
    multiple_of: int = 8
    """The length is rounded up to a multiple of this."""


@dataclass(frozen=True)
class FileFields:
    """What is served of one kind of cache file."""

    latents: TensorField
    text: tuple[TensorField, ...]
    """All tensors but the latents. A mask comes after the tensor that it belongs to."""
    values: tuple[str, ...]
    """Plain values; some tools store them as tensors."""
    unserved_tensors: tuple[str, ...] = ()
    """Tensors that files may have, but that are not served."""
    all_captions: bool = False
    """Whether all captions of a sample are served, rather than one."""

    @cached_property
    def names(self) -> frozenset[str]:
        """All known fields that are served."""
        return frozenset([self.latents.name, *(field.name for field in self.text), *self.values])

    @cached_property
    def of_captions(self) -> tuple[TensorField, ...]:
        """The tensors that each caption has."""
        return tuple(field for field in self.text if part_of(field.name) == "text")

    @cached_property
    def known(self) -> frozenset[str]:
        """All known fields, served or not."""
        return self.names | self.unserved

    @cached_property
    def unserved(self) -> frozenset[str]:
        """All known fields that are not served, and not read. Fields that are not known are served."""
        return (_PLAIN_VALUES | {*self.unserved_tensors}) - self.names


_PLAIN_VALUES = frozenset({
    "original_resolution", "bucket_resolution", "crop_resolution", "crop_offset", "prompt", "image_path", "video_path",
    "bucket_id", "aspect_ratio", "pixels", "num_frames", "model_type", "model_version", "deterministic_latents",
    "processing_mode", "frame_index", "total_frames_extracted", "source_frame_index", "cache_file",
})  # fmt: skip
"""The plain values that Latentry and NeMo AutoModel write."""

_IMAGE_VALUES = ("original_resolution", "crop_offset", "aspect_ratio", "bucket_id", "prompt", "image_path")
_IMAGE_LATENTS = TensorField("latent", 3)
_IMAGE_EMBEDDINGS = (
    TensorField("prompt_embeds", 2, padding=Padding("text_attention_mask")),
    TensorField("text_attention_mask", 1, required=False),
    TensorField("pooled_prompt_embeds", 1, required=False),
    TensorField("clip_hidden", 2, required=False, padding=Padding("clip_attention_mask")),
    TensorField("clip_attention_mask", 1, required=False),
)
_IMAGE_TOKENS = (TensorField("clip_tokens", 1), TensorField("t5_tokens", 1))
IMAGE_FIELDS = FileFields(
    latents=_IMAGE_LATENTS,
    text=_IMAGE_EMBEDDINGS,
    values=_IMAGE_VALUES,
    unserved_tensors=tuple(field.name for field in _IMAGE_TOKENS),
)
IMAGE_TOKEN_FIELDS = FileFields(
    latents=_IMAGE_LATENTS,
    text=_IMAGE_TOKENS,
    values=_IMAGE_VALUES,
    unserved_tensors=tuple(field.name for field in _IMAGE_EMBEDDINGS),
)
"""Token ids instead of embeddings, for training the text encoders."""
VIDEO_FIELDS = FileFields(
    latents=TensorField("video_latents", 4),
    text=(
        TensorField("text_embeddings", 2, padding=Padding("text_mask")),
        TensorField("text_mask", 1, required=False),
        TensorField("text_embeddings_2", 2, required=False, padding=Padding("text_mask_2")),
        TensorField("text_mask_2", 1, required=False),
        TensorField("image_embeds", 2, required=False),
        TensorField("audio_latents", 3, required=False, padding=Padding("audio_mask", multiple_of=1)),
        TensorField("audio_text_embeddings", 2, required=False, padding=Padding("audio_text_mask")),
    ),
    values=("aspect_ratio",),
    unserved_tensors=("first_frame",),
)


def with_row_values(contents: dict[str, Any], row: Mapping[str, Any], fields: FileFields) -> dict[str, Any]:
    """A sample's dictionary with the plain values of its row in place of its own, where the row has them.

    Args:
        contents: What the cache file holds. It is changed.
        row: The sample's row.
        fields: Their plain values are added if the file lacks them.
    """
    for name in fields.values:
        value = row.get(name)
        if value is not None:
            contents[name] = value
    if not contents.keys() <= fields.known:
        for name in (contents.keys() - fields.known) & row.keys():
            if row[name] is not None and _is_plain(contents[name]):
                contents[name] = row[name]
    return contents


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, (torch.Tensor, TensorLocation))
