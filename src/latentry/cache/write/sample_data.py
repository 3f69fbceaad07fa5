"""What a cache file and its row hold: the contract with every reader, NeMo AutoModel's included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from latentry.types import PlannedSample, ProcessorInfo


def image_file(
    sample: PlannedSample,
    latent: torch.Tensor,
    fields: dict[str, torch.Tensor],
    offset: tuple[int, int],
    path: Path,
    info: ProcessorInfo,
) -> dict[str, Any]:
    """The dictionary of an image's file: ``latent`` [C,h,w] and the text's fields, then plain values."""
    return {
        "latent": latent,
        **fields,
        "original_resolution": (sample.width, sample.height),
        "bucket_resolution": sample.bucket,
        "crop_offset": offset,
        "prompt": sample.caption.text,
        "image_path": str(path),
        "bucket_id": sample.bucket_id,
        "aspect_ratio": sample.bucket[0] / sample.bucket[1],
        "model_type": info.model_type,
    }


def video_file(
    sample: PlannedSample,
    latent: torch.Tensor,
    fields: dict[str, torch.Tensor],
    offset: tuple[int, int],
    path: Path,
    info: ProcessorInfo,
    *,
    mode: str,
    deterministic: bool,
    first_frame: torch.Tensor,
    source_frame: int | None,
) -> dict[str, Any]:
    """The dictionary of a clip's file, or of one frame's: ``video_latents`` [1,C,T,h,w] and the rest."""
    fields = dict(fields)
    text = fields.pop("text_embeddings", None)
    if text is None:  # a processor of images, too, calls it by their name
        text = fields.pop("prompt_embeds")
        fields.pop("pooled_prompt_embeds", None)
    data: dict[str, Any] = {"video_latents": latent[None], "text_embeddings": text, **fields}
    if mode == "video":
        data["first_frame"] = first_frame
    data |= {
        "original_resolution": (sample.width, sample.height),
        "bucket_resolution": sample.bucket,
        "crop_offset": offset,
        "bucket_id": sample.bucket_id,
        "aspect_ratio": sample.bucket[0] / sample.bucket[1],
        "num_frames": sample.num_frames,
        "prompt": sample.caption.text,
        "video_path": str(path),
        "deterministic_latents": deterministic,
        "processing_mode": mode,
        "model_version": info.model_version or info.name,
        "model_type": info.model_type,
    }
    if mode == "frames":
        data |= _frame_fields(sample, source_frame)
    return data


def metadata_row(sample: PlannedSample, data: dict[str, Any], source_digest: str) -> dict[str, Any]:
    """The row of a sample, with what the next run needs to tell whether it has changed.

    Where the sample is stored, and with which checksum, is for its writer to add.
    """
    source_key = "image_path" if "image_path" in data else "video_path"
    row: dict[str, Any] = {
        "cache_file": "",
        source_key: data[source_key],
        "bucket_resolution": list(sample.bucket),
        "original_resolution": [sample.width, sample.height],
        "prompt": sample.caption.text,
        "bucket_id": sample.bucket_id,
        "aspect_ratio": data["aspect_ratio"],
        "pixels": sample.bucket[0] * sample.bucket[1],
        "model_type": data["model_type"],
    }
    if sample.num_frames is not None:
        row["num_frames"] = sample.num_frames
    if "source_frame_index" in data:
        row |= _frame_fields(sample, data["source_frame_index"])
    return row | {
        "sample_name": sample.name,
        "caption_source": sample.caption.source,
        "source_name": sample.file.name,
        "source_bytes": sample.file.size_bytes,
        "source_modified_ns": sample.file.modified_ns,
        "source_digest": source_digest,
    }


def _frame_fields(sample: PlannedSample, source_frame: int | None) -> dict[str, Any]:
    return {
        "frame_index": sample.number,
        "total_frames_extracted": sample.num_samples,
        "source_frame_index": source_frame,
    }
