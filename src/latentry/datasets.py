"""A cache as a map-style PyTorch dataset, grouped into buckets.

Opening reads the index; an item is one cache file, checked against what its row promises. No model
library is needed: a machine that only trains imports neither diffusers nor transformers for this.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from latentry.buckets import MultiTierBucketCalculator, aspect_name
from latentry.cache.index import CacheIndex, index_of_rows, open_index
from latentry.cache.memory import BatchMemory
from latentry.cache.metadata import LazyRows, MetadataRows
from latentry.cache.packed import PackedIndex, PackedRows
from latentry.cache.reads import Reads
from latentry.cache.samples import FileSamples, PackedSamples, Samples, open_samples
from latentry.errors import CacheFileError, ConfigError
from latentry.records import BucketShape

logger = logging.getLogger(__name__)

VIDEO_OPTIONAL_FIELDS = {"text_mask": 1, "text_embeddings_2": 2, "text_mask_2": 1, "image_embeds": 2}
"""Tensors that a video file has if its model does, and their dimensions without the batch's."""
PLAIN_FIELDS = ("original_resolution", "crop_offset", "aspect_ratio", "bucket_id", "prompt", "image_path")
"""What is a plain value in most caches, and a tensor in some."""


class BatchItem(dict[str, Any]):
    """A sample that was read together with others: its tensors lie beside theirs, and nobody else has them."""

    def __init__(
        self, item: Mapping[str, Any] | Iterable[Any] = (), samples: Samples | None = None, row: int = 0
    ) -> None:
        super().__init__(item)
        self._samples = samples
        self._row = row

    @property
    def where(self) -> str:
        """Its place, for people; looked up only when it is asked for."""
        return "a sample" if self._samples is None else self._samples.where(self._row)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))  # in another process its tensors lie alone


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
        self.batch_memory = BatchMemory()
        self.reads = Reads()
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
        self.index = index_of_rows(named, self.index.metadata, self.cache_dir, self._aspect_ratio_to_name)
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

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several samples; subclasses may read them at once."""
        return [self[idx] for idx in indices]

    def _load(self, idx: int) -> CachedSample:
        row = range(len(self))[idx]
        return CachedSample(self, row, self.samples.load(row))

    def _load_many(self, indices: Sequence[int], names: Collection[str]) -> list[CachedSample]:
        """Several samples, with these of their tensors, side by side in memory that is used again and again."""
        rows = [range(len(self))[idx] for idx in indices]
        loaded = self.samples.load_many(rows, {*names, *PLAIN_FIELDS}, self.batch_memory, self.reads)
        return [CachedSample(self, row, data) for row, data in zip(rows, loaded, strict=True)]


class CachedSample:
    """A cache file's dictionary, together with what it must agree with."""

    def __init__(self, dataset: BaseMultiresolutionDataset, row: int, data: dict[str, Any]) -> None:
        self._dataset = dataset
        self._row = row
        self.shape: BucketShape = dataset.index.shape(row)
        self.data = data

    @property
    def where(self) -> str:
        """Its place, for people."""
        return self._dataset.samples.where(self._row)

    @property
    def file(self) -> str:
        return os.path.join(self._dataset.cache_dir, self._dataset.samples.file(self._row))

    def of_batch(self, item: Mapping[str, Any]) -> BatchItem:
        return BatchItem(item, self._dataset.samples, self._row)

    def value(self, key: str) -> Any:
        if self.data.get(key) is None:
            raise CacheFileError(f"{self.where} has no {key}; it holds {', '.join(map(str, self.data))}")
        return self.data[key]

    def pair(self, key: str) -> tuple[int, int]:
        """Two whole numbers, such as a resolution."""
        value = self.value(key)
        try:
            first, second = (int(number) for number in value)
        except (TypeError, ValueError, RuntimeError):
            found = " ".join(repr(value).split())
            raise CacheFileError(f"{self.where}: {key} is {found}; it must be two numbers") from None
        return first, second

    def tensor(self, key: str, num_dims: int) -> torch.Tensor:
        """The tensor under this key; a leading dimension of 1 too many is taken off."""
        value = self.value(key)
        if not isinstance(value, torch.Tensor):
            raise CacheFileError(f"{self.where}: {key} is a {type(value).__name__}, not a tensor")
        if value.ndim == num_dims + 1 and value.shape[0] == 1:
            value = value[0]
        if value.ndim != num_dims:
            raise CacheFileError(
                f"{self.where}: {key} has shape {list(value.shape)}; expected {num_dims} dimensions"
            )
        return value

    def latents(self, key: str, num_dims: int) -> torch.Tensor:
        """Latents, checked to be the bucket's picture shrunk by one whole factor."""
        value = self.tensor(key, num_dims)
        height, width = value.shape[-2:]
        factor = self.shape.width // max(1, width)
        if (width * factor, height * factor) != (self.shape.width, self.shape.height):
            raise CacheFileError(
                f"{self.where}: {key} has shape {list(value.shape)}, which is not a scaled-down "
                f"{self.shape.width}x{self.shape.height}, the bucket in its row"
            )
        if self.shape.num_frames is not None and num_dims == 4 and value.shape[1] > self.shape.num_frames:
            raise CacheFileError(
                f"{self.where}: {key} has {value.shape[1]} frames, but its row says num_frames {self.shape.num_frames}"
            )
        return value


class TextToImageDataset(BaseMultiresolutionDataset):
    """Image latents with their text embeddings, or with tokens if the text encoder is trained too."""

    def __init__(self, cache_dir: str | os.PathLike[str], train_text_encoder: bool = False) -> None:
        if not isinstance(train_text_encoder, bool):
            raise ConfigError(f"train_text_encoder is {train_text_encoder!r}; it must be true or false")
        self.train_text_encoder = train_text_encoder
        super().__init__(cache_dir, quantization=64)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return self._items([self._load(idx)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """A batch at once; its tensors lie side by side, so that collating copies nothing."""
        if type(self).__getitem__ is not TextToImageDataset.__getitem__:
            return super().__getitems__(indices)
        samples = self._load_many(indices, self._tensor_names)
        return [sample.of_batch(item) for sample, item in zip(samples, self._items(samples), strict=True)]

    @property
    def _tensor_names(self) -> tuple[str, ...]:
        if self.train_text_encoder:
            return ("latent", "clip_tokens", "t5_tokens")
        return ("latent", "prompt_embeds", "pooled_prompt_embeds", "clip_hidden")

    def _items(self, samples: Sequence[CachedSample]) -> list[dict[str, Any]]:
        items = [self._item(sample) for sample in samples]
        for key in ("crop_resolution", "original_resolution", "crop_offset"):
            pairs = torch.tensor([item[key] for item in items])  # at once: making a tensor is slow
            for item, pair in zip(items, pairs.unbind(), strict=True):
                item[key] = pair
        return items

    def _item(self, sample: CachedSample) -> dict[str, Any]:
        shape = sample.shape
        item: dict[str, Any] = {
            "latent": sample.latents("latent", 3),
            "crop_resolution": (shape.width, shape.height),
            "original_resolution": sample.pair("original_resolution"),
            "crop_offset": sample.pair("crop_offset"),
            "prompt": sample.value("prompt"),
            "image_path": sample.value("image_path"),
            "bucket_id": sample.data.get("bucket_id"),
            "aspect_ratio": sample.data.get("aspect_ratio", shape.width / shape.height),
            "cache_file": sample.file,
        }
        if self.train_text_encoder:
            item["clip_tokens"] = sample.tensor("clip_tokens", 1)
            item["t5_tokens"] = sample.tensor("t5_tokens", 1)
            return item
        item["prompt_embeds"] = sample.tensor("prompt_embeds", 2)
        if sample.data.get("pooled_prompt_embeds") is not None:
            item["pooled_prompt_embeds"] = sample.tensor("pooled_prompt_embeds", 1)
        if sample.data.get("clip_hidden") is not None:
            item["clip_hidden"] = sample.tensor("clip_hidden", 2)
        return item


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
        return self._item(self._load(idx))

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """A batch at once; its tensors lie side by side, so that collating copies nothing."""
        if type(self).__getitem__ is not TextToVideoDataset.__getitem__:
            return super().__getitems__(indices)
        names = ("video_latents", "text_embeddings", *VIDEO_OPTIONAL_FIELDS)
        return [sample.of_batch(self._item(sample)) for sample in self._load_many(indices, names)]

    def _item(self, sample: CachedSample) -> dict[str, Any]:
        shape = sample.shape
        item: dict[str, Any] = {
            "video_latents": sample.latents("video_latents", 4)[None].to(self.device),
            "text_embeddings": sample.tensor("text_embeddings", 2)[None].to(self.device),
            "bucket_resolution": torch.tensor([shape.width, shape.height]),
            "aspect_ratio": sample.data.get("aspect_ratio", shape.width / shape.height),
            "cache_file": sample.file,
        }
        for key, num_dims in VIDEO_OPTIONAL_FIELDS.items():
            if sample.data.get(key) is not None:
                item[key] = sample.tensor(key, num_dims)[None].to(self.device)
        return item
