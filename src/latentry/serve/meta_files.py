"""A flat folder of ``.meta`` files as a dataset: what early tools for Wan 2.1 wrote, without any metadata file.

Files are read as all cache files are, so nothing in them is executed. Opening reads the header of every file, because
the samples of a batch must have one shape, and only the files say which.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from latentry.cache.read.fields import VIDEO_FIELDS
from latentry.cache.read.file_contents import read_contents
from latentry.cache.read.files import load_cache_file
from latentry.cache.read.pickle_reader import TensorLocation
from latentry.errors import CacheFileError, CacheNotFoundError, ConfigError
from latentry.serve.dataloader_build import DiffusionDataloaderBuild
from latentry.serve.loader import LatentDataLoader
from latentry.serve.sampler import SequentialBucketSampler
from latentry.serve.shape_buckets import Item, LatentShape, ShapeBucketDataset, build_shape_bucket_loader

MAX_FILES_VARIABLE = "MAX_META_FILES"
"""The environment variable that limits the number of files if ``max_files`` is None."""
_SPATIAL_FACTOR = 8
_REQUIRED = {"video_latents": 5, "text_embeddings": 3}
"""Tensors that every file has, and their dimensions with the leading one."""

TensorTransform = Callable[[torch.Tensor], torch.Tensor]
MetadataFilter = Callable[[dict[str, Any]], bool]


class MetaFilesDataset(ShapeBucketDataset):
    """The ``.meta`` files of one folder, sorted by name.

    >>> dataset = MetaFilesDataset("clips_meta", filter_fn=lambda metadata: metadata["num_frames"] == 81)
    >>> dataset[0]["video_latents"].shape
    torch.Size([1, 16, 21, 60, 104])

    A sample has ``text_embeddings``, ``video_latents`` and the optional tensors of its model, all with a leading
    dimension of 1; tensors of other names as they are stored; ``metadata``, the file's plain values; and ``file_info``, with ``meta_filename`` and ``meta_path``.

    Args:
        meta_folder: The folder. Its subfolders are not searched.
        transform_text: Applied to ``text_embeddings``.
        transform_video: Applied to ``video_latents``. It must not change which samples have the same shape.
        filter_fn: Called with each file's ``metadata``. Files for which it returns False are left out.
        device: Where the tensors of samples are put.
        max_files: Take only the first N files, sorted by name, before ``filter_fn``. None is the value of the
            environment variable ``MAX_META_FILES``, or all files.
    """

    def __init__(
        self,
        meta_folder: str | os.PathLike[str],
        transform_text: TensorTransform | None = None,
        transform_video: TensorTransform | None = None,
        filter_fn: MetadataFilter | None = None,
        device: str | torch.device = "cpu",
        max_files: int | None = None,
    ) -> None:
        super().__init__()
        self.meta_folder = Path(meta_folder).expanduser().absolute()
        self.transform_text = transform_text
        self.transform_video = transform_video
        self.filter_fn = filter_fn
        self.device = device
        if not self.meta_folder.is_dir():
            raise CacheNotFoundError(
                f"there is no folder {self.meta_folder}; meta_folder must hold .meta files"
            )
        files = sorted(path for path in self.meta_folder.glob("*.meta") if path.is_file())
        headers = [(path, self._header(path)) for path in files[: _limit(max_files)]]
        kept = [
            (path, found) for path, found in headers if filter_fn is None or filter_fn(metadata_of(found))
        ]
        self.meta_files = [path for path, _ in kept]
        """The files of the samples."""
        self._found = [_latent_shape(path, found) for path, found in kept]
        if not kept:
            what = (
                f"none of its {len(headers)} .meta files passes filter_fn"
                if headers
                else "it has no .meta files"
            )
            raise CacheNotFoundError(f"{self.meta_folder} gives no samples: {what}")

    def _header(self, path: Path) -> dict[str, Any]:
        """The file's dictionary, with tensors or their descriptions."""
        with open(path, "rb") as file:
            found = read_contents(file.fileno(), path.suffix)
        return load_cache_file(self.meta_folder, path.name) if found is None else found

    def __len__(self) -> int:
        return len(self.meta_files)

    def __getitem__(self, index: int) -> Item:
        path = self.meta_files[index]
        data = load_cache_file(self.meta_folder, path.name)
        tensors = {
            key: _with_leading_dimension(key, value).to(self.device)
            for key, value in data.items()
            if isinstance(value, torch.Tensor) and key not in VIDEO_FIELDS.unserved
        }
        for key, transform in (
            ("text_embeddings", self.transform_text),
            ("video_latents", self.transform_video),
        ):
            if transform is not None:
                tensors[key] = transform(tensors[key])
        return {
            **{key: tensors.pop(key) for key in ("text_embeddings", "video_latents")},
            "metadata": metadata_of(data),
            "file_info": {"meta_filename": path.name, "meta_path": str(path)},
            **tensors,
        }

    def _shapes(self) -> Sequence[LatentShape]:
        return self._found

    def _identity(self) -> str:
        return "\n".join(path.name for path in self.meta_files)


def metadata_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a file. Early files have them in a dictionary under ``metadata``."""
    plain = {
        key: value for key, value in data.items() if not isinstance(value, (torch.Tensor, TensorLocation))
    }
    nested = plain.pop("metadata", None)
    return {**plain, **nested} if isinstance(nested, dict) else plain


def _limit(max_files: int | None) -> int | None:
    if max_files is None and (text := os.environ.get(MAX_FILES_VARIABLE)):
        if not text.isdecimal():
            raise ConfigError(f"{MAX_FILES_VARIABLE} is {text!r}; it must be a whole number, at least 1")
        max_files = int(text)
    if max_files is not None and max_files < 1:
        raise ConfigError(f"max_files is {max_files}; it must be at least 1")
    return max_files


def _latent_shape(path: Path, header: Mapping[str, Any]) -> LatentShape:
    """The shape of the file's latents; an error if a tensor is missing or has the wrong number of dimensions."""
    for key, num_dims in _REQUIRED.items():
        shape = getattr(header.get(key), "shape", None)
        if shape is None:
            raise CacheFileError(f"{path} has no {key}; it is not a .meta file of a video")
        if len(shape) not in (num_dims, num_dims - 1):
            raise CacheFileError(f"{path}: {key} has shape {list(shape)}; it must have {num_dims} dimensions")
    latents = tuple(header["video_latents"].shape)
    resolution = metadata_of(header).get("bucket_resolution")
    if not (isinstance(resolution, (tuple, list)) and len(resolution) == 2):
        resolution = latents[-1] * _SPATIAL_FACTOR, latents[-2] * _SPATIAL_FACTOR
    return LatentShape((int(resolution[0]), int(resolution[1])), latents)


def _with_leading_dimension(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Early files store some tensors without their leading dimension of 1."""
    return tensor[None] if tensor.ndim == _REQUIRED.get(key, 0) - 1 else tensor


@dataclass(frozen=True, slots=True)
class MetaFilesDatasetConfig:
    """The parameters of a ``MetaFilesDataset``."""

    meta_folder: str
    """The folder of the files."""
    transform_text: TensorTransform | None = None
    """Applied to the text embeddings of each sample."""
    transform_video: TensorTransform | None = None
    """Applied to the latents of each sample."""
    filter_fn: MetadataFilter | None = None
    """Files for whose metadata it returns False are left out."""
    device: str = "cpu"
    """Where the tensors are put."""
    max_files: int | None = None
    """Take only the first N files."""

    def build(self) -> MetaFilesDataset:
        """Build the dataset."""
        return MetaFilesDataset(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True)
class MetaFilesDataloaderConfig:
    """A loader over a flat folder of ``.meta`` files.

    >>> build = MetaFilesDataloaderConfig("clips_meta").build(dp_rank=0, dp_world_size=1, batch_size=2)
    >>> for batch in build.dataloader: ...
    """

    meta_folder: str
    """The folder of the files."""
    shuffle: bool = True
    """Permute the samples, differently in every epoch."""
    num_workers: int = 2
    """Threads that prefetch batches; 0 reads each batch when it is requested."""
    device: str = "cpu"
    """Where the tensors are put."""
    transform_text: TensorTransform | None = None
    """Applied to the text embeddings of each sample."""
    transform_video: TensorTransform | None = None
    """Applied to the latents of each sample."""
    filter_fn: MetadataFilter | None = None
    """Files for whose metadata it returns False are left out."""
    max_files: int | None = None
    """Take only the first N files."""

    @property
    def dataset(self) -> MetaFilesDatasetConfig:
        """The configuration of the loader's dataset."""
        names = [field.name for field in fields(MetaFilesDatasetConfig)]
        return MetaFilesDatasetConfig(**{name: getattr(self, name) for name in names})

    def build(
        self, *, dp_rank: int | None, dp_world_size: int | None, batch_size: int
    ) -> DiffusionDataloaderBuild:
        """Build the loader of one rank.

        Args:
            dp_rank: This data-parallel rank. None is the rank of ``torch.distributed``, or 0.
            dp_world_size: The number of data-parallel ranks. None is the world size of ``torch.distributed``, or 1.
            batch_size: Samples per batch and rank.
        """
        loader, sampler = build_shape_bucket_loader(
            self.dataset.build(),
            batch_size=batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            shuffle=self.shuffle,
            num_workers=self.num_workers,
        )
        return DiffusionDataloaderBuild(loader, sampler)


def build_dataloader(
    *,
    meta_folder: str,
    batch_size: int,
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    shuffle: bool = True,
    num_workers: int = 2,
    device: str = "cpu",
    transform_text: TensorTransform | None = None,
    transform_video: TensorTransform | None = None,
    filter_fn: MetadataFilter | None = None,
    max_files: int | None = None,
) -> tuple[LatentDataLoader, SequentialBucketSampler]:
    """Build a loader over a flat folder of ``.meta`` files. Returns the loader and its sampler.

    >>> loader, sampler = build_dataloader(meta_folder="clips_meta", batch_size=2)

    Args:
        meta_folder: The folder of the files.
        batch_size: Samples per batch and rank.
        dp_rank: This data-parallel rank. By default the rank of ``torch.distributed``, or 0.
        dp_world_size: The number of data-parallel ranks. By default the world size of ``torch.distributed``, or 1.
        shuffle: Permute the samples, differently in every epoch.
        num_workers: Threads that prefetch batches. 0 reads each batch when it is requested.
        device: Where the tensors are put.
        transform_text: Applied to the text embeddings of each sample.
        transform_video: Applied to the latents of each sample.
        filter_fn: Files for whose metadata it returns False are left out.
        max_files: Take only the first N files.
    """
    config = MetaFilesDataloaderConfig(
        meta_folder, shuffle, num_workers, device, transform_text, transform_video, filter_fn, max_files
    )
    built = config.build(dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=batch_size)
    return built.dataloader, built.sampler
