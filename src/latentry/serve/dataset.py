"""A cache as a map-style PyTorch dataset, grouped into buckets.

Opening reads the index; an item is one cache file, checked against what its row promises. No model
library is needed: a machine that only trains imports neither diffusers nor transformers for this.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from latentry.buckets import MultiTierBucketCalculator, aspect_name
from latentry.cache.index import CacheIndex, open_index
from latentry.cache.index.file_index import index_of_dicts
from latentry.cache.index.packed_index import PackedIndex
from latentry.cache.index.rows import LazyRows, MetadataRows, PackedRows
from latentry.cache.read.batch_buffers import Loaded
from latentry.cache.read.buffer_pool import BufferPool
from latentry.cache.read.read_threads import ReadThreads
from latentry.cache.read.samples import FileSamples, PackedSamples, Samples, open_samples
from latentry.errors import ConfigError
from latentry.serve.batch import CachedSamples, Column, Items, Places, each

logger = logging.getLogger(__name__)

VIDEO_OPTIONAL_FIELDS = {"text_mask": 1, "text_embeddings_2": 2, "text_mask_2": 1, "image_embeds": 2}
"""Tensors that a video file has if its model does, and their dimensions without the batch's."""
PLAIN_FIELDS = ("original_resolution", "crop_offset", "aspect_ratio", "bucket_id", "prompt", "image_path")
"""What is a plain value in most caches, and a tensor in some."""


class BaseMultiresolutionDataset(Dataset[dict[str, Any]], ABC):
    """The samples of a cache by bucket; subclasses say what an item is.

    ``bucket_groups`` maps a bucket's key to its ``indices``, ``resolution``, ``pixels``,
    ``aspect_name``, ``aspect_ratio`` and ``num_frames``; ``sorted_bucket_keys`` lists the keys by
    pixels, ascending, ties in order of first appearance. A key is (aspect name, (width, height)),
    and where clips of different lengths occur, also the number of frames: a batch always stacks.
    """

    def __init__(self, cache_dir: str | os.PathLike[str], quantization: int = 64) -> None:
        if not isinstance(cache_dir, (str, os.PathLike)):
            raise ConfigError(f"cache_dir is {cache_dir!r}; it must be the path of a folder")
        self.cache_dir = Path(cache_dir).expanduser().absolute()
        self.calculator = MultiTierBucketCalculator(quantization=quantization)
        self.batch_memory = BufferPool()
        self.reads = ReadThreads()
        self._open()

    def _open(self) -> None:
        self._open_cache()
        self._group_by_bucket()

    def _open_cache(self) -> None:
        self.index: CacheIndex | PackedIndex = open_index(self.cache_dir, self._aspect_ratio_to_name)
        self.samples: Samples = open_samples(self.cache_dir, self.index)
        self._rows: Sequence[dict[str, Any]]
        if isinstance(self.index, PackedIndex):
            self._rows = PackedRows(self.cache_dir, self.index)
        else:
            self._rows = MetadataRows(self.cache_dir, self.index.metadata.shards, self.index.shard_lengths)

    @property
    def is_packed(self) -> bool:
        """Whether samples lie in shards, rather than in files of their own."""
        return isinstance(self.samples, PackedSamples)

    @property
    def metadata(self) -> Sequence[dict[str, Any]]:
        """The samples' rows. A subclass may assign fewer of them, and call ``_group_by_bucket``."""
        return self._rows

    @metadata.setter
    def metadata(self, rows: Sequence[dict[str, Any]]) -> None:
        rows = list(rows)
        named: Sequence[dict[str, Any]] = rows
        if isinstance(self.samples, PackedSamples):
            try:
                samples = self.samples.some([row["packed_row"] for row in rows])
            except KeyError:
                raise ConfigError(
                    f"rows given for {self.cache_dir} lack packed_row; take them from the dataset's metadata"
                ) from None
            named = [{**row, "cache_file": samples.name(i)} for i, row in enumerate(rows)]
            self.samples = samples
        self.index = index_of_dicts(named, self.index.metadata, self.cache_dir, self._aspect_ratio_to_name)
        if isinstance(self.samples, FileSamples):
            self.samples = FileSamples(self.cache_dir, self.index)
        self._rows = rows

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what another process can open by itself."""
        reopened = ["index", "samples"]
        if isinstance(self._rows, LazyRows):
            reopened += ["_rows", "bucket_groups"]
        return {k: v for k, v in self.__dict__.items() if k not in reopened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        rows = state.get("_rows")
        self._open_cache()
        if rows is not None:
            self.metadata = rows
        else:
            self._group_by_bucket()

    def _aspect_ratio_to_name(self, aspect_ratio: float) -> str:
        """``tall``, ``square`` or ``wide``."""
        return aspect_name(aspect_ratio)

    def _group_by_bucket(self) -> None:
        """Fill ``bucket_groups`` and ``sorted_bucket_keys``."""
        frames_differ = len({shape.num_frames for shape in self.index.shapes}) > 1
        self.bucket_groups: dict[Any, dict[str, Any]] = {}
        for shape, rows in zip(self.index.shapes, self.index.rows_by_shape(), strict=True):
            resolution = (shape.width, shape.height)
            key: tuple[Any, ...] = (shape.aspect_name, resolution)
            if frames_differ:
                key = (*key, shape.num_frames)
            self.bucket_groups[key] = {
                "indices": rows,
                "resolution": resolution,
                "pixels": shape.pixels,
                "aspect_name": shape.aspect_name,
                "aspect_ratio": shape.width / shape.height,
                "num_frames": shape.num_frames,
            }
        self.sorted_bucket_keys = sorted(
            self.bucket_groups, key=lambda key: self.bucket_groups[key]["pixels"]
        )

    def get_bucket_info(self) -> dict[str, Any]:
        """How many samples each bucket has, for people to read."""
        return {
            "total_buckets": len(self.bucket_groups),
            "buckets": {
                "/".join([key[0], "x".join(map(str, key[1])), *map(str, key[2:])]): len(group["indices"])
                for key, group in self.bucket_groups.items()
            },
        }

    @property
    def fingerprint(self) -> str:
        """Identifies the samples and their order, wherever the cache lies; a sampler's state holds it."""
        return self.index.fingerprint

    def __len__(self) -> int:
        return len(self.index)

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, Any]:
        """One sample, ready for its collate function."""

    def __getitems__(self, indices: Sequence[int]) -> Sequence[dict[str, Any]]:
        """Several samples; subclasses may read them at once."""
        return [self[idx] for idx in indices]

    def _load(self, idx: int) -> CachedSamples:
        """One sample, in memory of its own."""
        row = range(len(self))[idx]
        return self._cached([row], Loaded([self.samples.load(row)], {}))

    def _load_many(self, indices: Sequence[int], names: Collection[str]) -> CachedSamples:
        """Several samples, with these of their tensors, side by side in memory that is used again and again."""
        rows = [range(len(self))[idx] for idx in indices]
        return self._cached(
            rows, self.samples.load_many(rows, {*names, *PLAIN_FIELDS}, self.batch_memory, self.reads)
        )

    def _cached(self, rows: Sequence[int], loaded: Loaded) -> CachedSamples:
        shapes = [self.index.shape(row) for row in rows]
        return CachedSamples(Places(self.cache_dir, self.samples, rows), shapes, loaded)


class TextToImageDataset(BaseMultiresolutionDataset):
    """Image latents with their text embeddings, or with tokens if the text encoder is trained too."""

    def __init__(self, cache_dir: str | os.PathLike[str], train_text_encoder: bool = False) -> None:
        if not isinstance(train_text_encoder, bool):
            raise ConfigError(f"train_text_encoder is {train_text_encoder!r}; it must be true or false")
        self.train_text_encoder = train_text_encoder
        super().__init__(cache_dir, quantization=64)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return dict(self._items(self._load(idx))[0])

    def __getitems__(self, indices: Sequence[int]) -> Sequence[dict[str, Any]]:
        """A batch at once; its tensors lie side by side, so that collating copies nothing."""
        if type(self).__getitem__ is not TextToImageDataset.__getitem__:
            return super().__getitems__(indices)
        return self._items(self._load_many(indices, ("latent", *self._texts, *self._optional_texts)))

    @property
    def _texts(self) -> Mapping[str, int]:
        """Tensors of the captions, and their dimensions without the batch's."""
        return {"clip_tokens": 1, "t5_tokens": 1} if self.train_text_encoder else {"prompt_embeds": 2}

    @property
    def _optional_texts(self) -> Mapping[str, int]:
        return {} if self.train_text_encoder else {"pooled_prompt_embeds": 1, "clip_hidden": 2}

    def _items(self, cached: CachedSamples) -> Items:
        tensors: dict[str, Column] = {
            "latent": cached.latents("latent", 3),
            "crop_resolution": torch.tensor([(shape.width, shape.height) for shape in cached.shapes]),
            "original_resolution": cached.pairs("original_resolution"),
            "crop_offset": cached.pairs("crop_offset"),
        }
        tensors |= {key: cached.tensors(key, num_dims) for key, num_dims in self._texts.items()}
        for key, num_dims in self._optional_texts.items():
            if cached.has(key):
                tensors[key] = cached.tensors(key, num_dims, required=False)
        values = {
            "prompt": cached.values("prompt"),
            "image_path": cached.values("image_path"),
            "bucket_id": cached.optional("bucket_id"),
            "aspect_ratio": cached.aspect_ratios(),
        }
        return Items.of(tensors, values, cached.places)


class TextToVideoDataset(BaseMultiresolutionDataset):
    """Video latents with their text embeddings and whatever else their model conditions on.

    Tensors keep the leading dimension of 1 that video files store them with.
    """

    def __init__(
        self, cache_dir: str | os.PathLike[str], model_type: str = "wan", device: str | torch.device = "cpu"
    ) -> None:
        if not isinstance(model_type, str):
            raise ConfigError(f"model_type is {model_type!r}; it must be a name such as 'wan'")
        self.model_type = model_type
        self.device = device
        super().__init__(cache_dir, quantization=8)
        written_for = self.index.metadata.model_type
        if written_for and not (written_for.startswith(model_type) or model_type.startswith(written_for)):
            logger.warning(
                "%s was made for %r, but model_type is %r", self.cache_dir, written_for, model_type
            )

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return dict(self._items(self._load(idx))[0])

    def __getitems__(self, indices: Sequence[int]) -> Sequence[dict[str, Any]]:
        """A batch at once; its tensors lie side by side, so that collating copies nothing."""
        if type(self).__getitem__ is not TextToVideoDataset.__getitem__:
            return super().__getitems__(indices)
        names = ("video_latents", "text_embeddings", *VIDEO_OPTIONAL_FIELDS)
        return self._items(self._load_many(indices, names))

    def _items(self, cached: CachedSamples) -> Items:
        tensors = {
            "video_latents": cached.latents("video_latents", 4),
            "text_embeddings": cached.tensors("text_embeddings", 2),
        }
        for key, num_dims in VIDEO_OPTIONAL_FIELDS.items():
            if cached.has(key):
                tensors[key] = cached.tensors(key, num_dims, required=False)
        tensors = {
            key: each(column, lambda batch: batch[:, None].to(self.device)) for key, column in tensors.items()
        }
        tensors["bucket_resolution"] = torch.tensor([(shape.width, shape.height) for shape in cached.shapes])
        return Items.of(tensors, {"aspect_ratio": cached.aspect_ratios()}, cached.places)
