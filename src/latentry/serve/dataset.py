"""A cache as a map-style PyTorch dataset, grouped into buckets.

Opening reads the index only. A batch is read as columns and checked against the samples' rows. Reading needs no model
library: a training machine imports neither diffusers nor transformers for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from latentry.buckets import MultiTierBucketCalculator, aspect_name
from latentry.cache.format import METADATA_NAME, CacheMetadata
from latentry.cache.index import CacheIndex, open_index
from latentry.cache.index.file_index import index_of_dicts
from latentry.cache.index.packed_index import PackedIndex
from latentry.cache.index.rows import LazyRows, Rows, open_rows
from latentry.cache.read.checks import image_columns, map_samples, video_columns
from latentry.cache.read.columns import Column, Columns
from latentry.cache.read.fields import IMAGE_FIELDS, IMAGE_TOKEN_FIELDS, VIDEO_FIELDS, FileFields
from latentry.cache.read.file_samples import FileSamples
from latentry.cache.read.packed_samples import PackedSamples
from latentry.cache.read.resources import ReadResources
from latentry.cache.read.samples import Samples, open_samples
from latentry.cache.read.tiled_latents import TiledLatents
from latentry.cache.read.warn_once import WarnOnce
from latentry.errors import ConfigError
from latentry.serve.all_captions import fields_of_all_captions, merge_captions
from latentry.serve.collate import Batch, image_batch, video_batch
from latentry.serve.row_numbers import RowNumbers
from latentry.types import Bucket, model_family

logger = logging.getLogger(__name__)

CAPTION_CHOICES = ("random", "first", "all")
"""Which caption of several a sample has."""
VIDEO_OPTIONAL_FIELDS = {field.name: field.num_dims for field in VIDEO_FIELDS.text if not field.required}
"""Tensors that a video file has if its model uses them, and their dimensions without the batch dimension."""


class BaseMultiresolutionDataset(Dataset[dict[str, Any]]):
    """The samples of a cache, grouped by bucket. A subclass defines ``read_batch`` or ``__getitem__``.

    >>> class Prompts(BaseMultiresolutionDataset):
    ...     def __getitem__(self, idx):
    ...         return {"prompt": self.metadata[idx]["prompt"]}

    ``bucket_groups`` maps a bucket's key to its ``indices``, ``resolution``, ``pixels``, ``aspect_name``,
    ``aspect_ratio`` and ``num_frames``. ``sorted_bucket_keys`` lists the keys by pixels, ascending; ties stay in order
    of first appearance. A key is (aspect name, (width, height)). If the cache has clips of different lengths, the
    number of frames is part of the key, so that all samples of a bucket can be stacked.

    Args:
        cache_dir: The folder of a finished cache.
        quantization: The sides of buckets are multiples of this; only ``calculator`` uses it.
        caption_choice: Which caption of several a sample has: ``random`` draws one for each epoch, ``first`` is
            always the same, and ``all`` adds a caption dimension to the text tensors.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        quantization: int = 64,
        *,
        caption_choice: str = "random",
    ) -> None:
        if caption_choice not in CAPTION_CHOICES:
            raise ConfigError(
                f"unknown caption_choice {caption_choice!r}; choose one of {', '.join(CAPTION_CHOICES)}"
            )
        self.caption_choice = caption_choice
        if not isinstance(cache_dir, (str, os.PathLike)):
            raise ConfigError(f"cache_dir is {cache_dir!r}; it must be the path of a folder")
        self.cache_dir = Path(cache_dir).expanduser().absolute()
        self.calculator = MultiTierBucketCalculator(quantization=quantization)
        self._resources = ReadResources()
        self._warn_once = WarnOnce()
        rows = self._load_metadata()
        if rows is not None and rows is not getattr(self, "_rows", None):
            self.metadata = rows
        if not hasattr(self, "index"):
            raise ConfigError(f"{type(self).__name__}._load_metadata returned no rows and assigned none")
        self._group_by_bucket()

    # ---- reading ----------------------------------------------------------------------------

    def read_batch(self, indices: Sequence[int], resources: ReadResources | None = None) -> Columns:
        """Read several samples at once, by field.

        Args:
            indices: Which samples.
            resources: Memory and threads to read with. By default the dataset's own.
        """
        if not self._overrides("__getitem__"):
            raise ConfigError(f"{type(self).__name__} defines neither read_batch nor __getitem__")
        return Columns.of_items([self[idx] for idx in indices])

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """One sample, as its collate function expects it."""
        return self.read_batch([idx]).items()[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several samples. PyTorch's loaders call this with the indices of a batch."""
        if self._overrides("__getitem__"):
            return [self[idx] for idx in indices]
        return self.read_batch(indices).items()

    def collate(self, columns: Columns) -> Batch:
        """The batch that a trainer receives.

        Args:
            columns: What ``read_batch`` returned.
        """
        raise ConfigError(f"{type(self).__name__} has no collate; give the loader a collate_fn")

    def collate_items(self, items: Sequence[dict[str, Any]]) -> Batch:
        """The same batch from a list of samples: a ``collate_fn`` for PyTorch's loaders.

        Args:
            items: What ``__getitems__`` returned.
        """
        return self.collate(Columns.of_items(items))

    @property
    def has_own_items(self) -> bool:
        """Whether a subclass overrides ``__getitem__`` or ``__getitems__``, so that batches consist of its items."""
        return self._overrides("__getitem__") or self._overrides("__getitems__")

    def _overrides(self, name: str) -> bool:
        """Whether a class that comes before the one that defines ``read_batch`` defines this method."""
        order = type(self).__mro__
        owner, reader = (_defining_class(type(self), method) for method in (name, "read_batch"))
        return order.index(owner) < order.index(reader)

    def _read_fields(
        self, indices: Sequence[int], fields: FileFields, resources: ReadResources | None
    ) -> tuple[Columns, list[Bucket]]:
        """What is stored in files and rows, and the samples' buckets."""
        rows = [range(len(self))[idx] for idx in indices]
        draws = [getattr(idx, "caption_draw", None) for idx in indices] if self.draws_captions else None
        columns = self.samples.read(rows, fields, resources or self._resources, draws)
        return columns, [self.index.bucket(row) for row in rows]

    def _read_checked(
        self,
        indices: Sequence[int],
        fields: FileFields,
        resources: ReadResources | None,
        check: Callable[[Columns, Sequence[Bucket], FileFields], Columns],
    ) -> Columns:
        """These fields after a check against the samples' rows, with the captions that were chosen."""
        if self.caption_choice != "all":
            return check(*self._read_fields(indices, fields, resources), fields)
        all_fields = fields_of_all_captions(fields, self.max_captions)
        read, buckets = self._read_fields(indices, all_fields, resources)
        return merge_captions(check(read, buckets, all_fields), read, fields, self.max_captions)

    @property
    def max_captions(self) -> int:
        """The largest number of captions of a sample."""
        return self.index.metadata.max_captions or 1

    @property
    def draws_captions(self) -> bool:
        """Whether the sampler has to say which captions are read."""
        return self.caption_choice == "random" and self.max_captions > 1

    # ---- the cache --------------------------------------------------------------------------

    def _load_metadata(self) -> Rows | None:
        """The samples' rows. A subclass may override it to return other rows, or to assign ``metadata``.

        >>> class Squares(TextToImageDataset):
        ...     def _load_metadata(self):
        ...         return [row for row in super()._load_metadata() if row["aspect_ratio"] == 1]
        """
        self._open_cache()
        return self._rows

    def _open_cache(self) -> None:
        self.index: CacheIndex | PackedIndex = open_index(self.cache_dir, self._aspect_ratio_to_name)
        self._rows: Rows = open_rows(self.cache_dir, self.index)
        self.samples: Samples = open_samples(self.cache_dir, self.index, self._rows)

    @property
    def is_packed(self) -> bool:
        """Whether the cache has shards, rather than one file per sample."""
        return isinstance(self.samples, PackedSamples)

    @property
    def metadata(self) -> Rows:
        """The samples' rows. A subclass may assign others, and then call ``_group_by_bucket``."""
        return self._rows

    @metadata.setter
    def metadata(self, rows: Rows) -> None:
        rows = list(rows)
        if not hasattr(self, "index") and (self.cache_dir / METADATA_NAME).exists():
            self._open_cache()
        metadata = self.index.metadata if hasattr(self, "index") else CacheMetadata(shards=[])
        named = rows
        packed = getattr(self, "samples", None)
        if isinstance(packed, PackedSamples):
            try:
                packed = packed.some(rows, [row["packed_row"] for row in rows])
            except KeyError:
                raise ConfigError(
                    f"the rows assigned for {self.cache_dir} lack packed_row; take them from the dataset's metadata"
                ) from None
            named = [{**row, "cache_file": packed.name(i)} for i, row in enumerate(rows)]
        index = index_of_dicts(named, metadata, self.cache_dir, self._aspect_ratio_to_name)
        self.index = index
        self.samples = (
            packed if isinstance(packed, PackedSamples) else FileSamples(self.cache_dir, index, rows)
        )
        self._rows = rows

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what the other process opens itself."""
        reopened = ["index", "samples"]
        if isinstance(self._rows, LazyRows):
            reopened += ["_rows", "bucket_groups"]
        return {k: v for k, v in self.__dict__.items() if k not in reopened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_rows" in state:
            self.metadata = state["_rows"]
        else:
            self._open_cache()
            self._group_by_bucket()

    @property
    def fingerprint(self) -> str:
        """Identifies the samples and their order, wherever the cache is; a sampler's state holds it."""
        return self.index.fingerprint

    def __len__(self) -> int:
        return len(self.index)

    # ---- buckets ----------------------------------------------------------------------------

    def _aspect_ratio_to_name(self, aspect_ratio: float) -> str:
        """``tall``, ``square`` or ``wide``."""
        return aspect_name(aspect_ratio)

    def _group_by_bucket(self) -> None:
        """Fill ``bucket_groups`` and ``sorted_bucket_keys``."""
        frames_differ = len({named.num_frames for named in self.index.bucket_keys}) > 1
        self.bucket_groups: dict[Any, dict[str, Any]] = {}
        rows_by_bucket: Sequence[range | npt.NDArray[np.int64]] = self.index.rows_by_bucket()
        for named, rows in zip(self.index.bucket_keys, rows_by_bucket, strict=True):
            bucket = named.bucket
            key: tuple[Any, ...] = (named.aspect_name, bucket.resolution)
            if frames_differ:
                key = (*key, bucket.num_frames)
            self.bucket_groups[key] = {
                "indices": RowNumbers(rows),
                "resolution": bucket.resolution,
                "pixels": bucket.pixels,
                "aspect_name": named.aspect_name,
                "aspect_ratio": bucket.width / bucket.height,
                "num_frames": bucket.num_frames,
            }
        self.sorted_bucket_keys = sorted(
            self.bucket_groups, key=lambda key: self.bucket_groups[key]["pixels"]
        )

    def get_bucket_info(self) -> dict[str, Any]:
        """The number of samples in each bucket, with readable names."""
        return {
            "total_buckets": len(self.bucket_groups),
            "buckets": {
                "/".join([key[0], "x".join(map(str, key[1])), *map(str, key[2:])]): len(group["indices"])
                for key, group in self.bucket_groups.items()
            },
        }


def _defining_class(cls: type, name: str) -> type:
    """The class whose method of this name ``cls`` uses."""
    return next(base for base in cls.__mro__ if name in vars(base))


class TextToImageDataset(BaseMultiresolutionDataset):
    """Image latents with their text embeddings, or with token ids.

    >>> dataset = TextToImageDataset("cache")
    >>> dataset[0]["latent"].shape
    torch.Size([16, 64, 64])

    Args:
        cache_dir: The folder of a finished image cache.
        train_text_encoder: Read token ids (``clip_tokens``, ``t5_tokens``) instead of embeddings.
        caption_choice: Which caption of several a sample has: ``random`` draws one for each epoch, ``first`` is
            always the same, and ``all`` adds a caption dimension to the text tensors. Indices that do not come from
            a ``SequentialBucketSampler`` get the first caption instead of a random one.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        train_text_encoder: bool = False,
        *,
        caption_choice: str = "random",
    ) -> None:
        if not isinstance(train_text_encoder, bool):
            raise ConfigError(f"train_text_encoder is {train_text_encoder!r}; it must be true or false")
        self.train_text_encoder = train_text_encoder
        super().__init__(cache_dir, quantization=64, caption_choice=caption_choice)

    def read_batch(self, indices: Sequence[int], resources: ReadResources | None = None) -> Columns:
        if not len(indices):
            return Columns.of_items([])
        fields = IMAGE_TOKEN_FIELDS if self.train_text_encoder else IMAGE_FIELDS
        return self._read_checked(indices, fields, resources, image_columns)

    def collate(self, columns: Columns) -> Batch:
        return image_batch(columns, self._warn_once)


class TextToVideoDataset(BaseMultiresolutionDataset):
    """Video latents with their text embeddings and the other tensors that their model uses.

    The tensors of a sample have the leading dimension of 1 that video files store them with, as in the documented
    interface. Reading removes it (``cache/read/checks.py``); ``read_batch`` adds it again, and ``collate`` merges it
    with the batch dimension.

    >>> dataset = TextToVideoDataset("clip_cache", model_type="wan")
    >>> dataset[0]["video_latents"].shape
    torch.Size([1, 16, 21, 60, 104])

    Args:
        cache_dir: The folder of a finished video cache.
        model_type: The model that is trained. A warning is logged if the cache was made for another one.
        device: Where the tensors of samples are put.
        caption_choice: As for ``TextToImageDataset``.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        model_type: str = "wan",
        device: str | torch.device = "cpu",
        *,
        caption_choice: str = "random",
    ) -> None:
        if not isinstance(model_type, str):
            raise ConfigError(f"model_type is {model_type!r}; it must be a name such as 'wan'")
        self.model_type = model_type
        self.device = device
        super().__init__(cache_dir, quantization=8, caption_choice=caption_choice)
        self._tiles = TiledLatents.of_cache(self.cache_dir, self.index.metadata, self._warn_once)
        written_for = self.index.metadata.model_type or model_type
        first, second = model_family(written_for), model_family(model_type)
        if not (first.startswith(second) or second.startswith(first)):
            logger.warning(
                "%s was made for %r, but model_type is %r", self.cache_dir, written_for, model_type
            )

    def read_batch(self, indices: Sequence[int], resources: ReadResources | None = None) -> Columns:
        if not len(indices):
            return Columns.of_items([])
        check = partial(video_columns, tiles=self._tiles)
        columns = self._read_checked(indices, VIDEO_FIELDS, resources, check)
        tensors = {name: self._as_item(name, column) for name, column in columns.tensors.items()}
        return Columns(columns.num_samples, tensors, columns.values, columns.describe)

    def _as_item(self, name: str, column: Column) -> Column:
        """The field on the dataset's device, with the leading dimension of 1 that was removed."""
        if name == "bucket_resolution":
            return column
        if name in VIDEO_FIELDS.names:
            return map_samples(column, lambda batch: batch[:, None].to(self.device))
        return map_samples(column, lambda batch: batch.to(self.device))

    def collate(self, columns: Columns) -> Batch:
        return video_batch(columns, self._warn_once)
