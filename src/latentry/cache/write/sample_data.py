"""What a cache file and its row hold: the contract with every reader, including NeMo AutoModel's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from latentry.cache.caption_keys import PROMPTS, caption_key
from latentry.cache.format import Row
from latentry.types import PlannedSample, ProcessorInfo

SampleData = dict[str, Any]
"""The dictionary in a cache file: tensors and plain values."""


def image_data(
    sample: PlannedSample,
    latent: torch.Tensor,
    fields: dict[str, torch.Tensor],
    offset: tuple[int, int],
    path: Path,
    info: ProcessorInfo,
) -> SampleData:
    """An image's dictionary: ``latent`` [C,h,w] and the captions' fields, then plain values."""
    return {
        "latent": latent,
        **fields,
        "original_resolution": (sample.width, sample.height),
        "bucket_resolution": sample.bucket.resolution,
        "crop_offset": offset,
        **_prompts(sample),
        "image_path": str(path),
        "bucket_id": sample.bucket_id,
        "aspect_ratio": sample.bucket.width / sample.bucket.height,
        "model_type": info.model_type,
    }


def video_data(
    sample: PlannedSample,
    latent: torch.Tensor,
    fields: dict[str, torch.Tensor],
    offset: tuple[int, int],
    path: Path,
    info: ProcessorInfo,
    *,
    mode: str,
    deterministic: bool,
    first_frame: torch.Tensor | None,
    source_frame: int | None,
) -> SampleData:
    """A clip's dictionary, or a single frame's: ``video_latents`` [1,C,T,h,w] and the captions' fields, then values."""
    data: SampleData = {
        "video_latents": latent[None],
        "text_embeddings": fields["text_embeddings"],
        **fields,
        "first_frame": first_frame if mode == "video" else None,
        "original_resolution": (sample.width, sample.height),
        "bucket_resolution": sample.bucket.resolution,
        "bucket_id": sample.bucket_id,
        "aspect_ratio": sample.bucket.width / sample.bucket.height,
        "num_frames": sample.bucket.num_frames,
        **_prompts(sample),
        "video_path": str(path),
        "deterministic_latents": deterministic,
        "model_version": info.model_version or info.name,
        "processing_mode": mode,
        "model_type": info.model_type,
        "crop_offset": offset,
    }
    if mode == "frames":
        data |= {
            "frame_index": sample.number + 1,
            "total_frames_extracted": sample.num_samples,
            "source_frame_index": source_frame,
        }
    if sample.window is not None:
        data |= {
            "window_index": sample.number,
            "num_windows": sample.num_samples,
            "window_start_s": sample.window.start_s,
            "window_frames": (sample.window.first_frame, sample.window.last_frame),
        }
    return data


def sample_fields(
    texts: Sequence[Mapping[str, torch.Tensor]], extra: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a sample besides its latents, by their keys in the file.

    Args:
        texts: The fields of each caption.
        extra: What else depends on the pixels.
    """
    numbered = {
        caption_key(name, number): tensor
        for number, fields in enumerate(texts)
        for name, tensor in fields.items()
        if number
    }
    return {**texts[0], **extra, **numbered}


def caption_fields(fields: Mapping[str, torch.Tensor], media: str) -> dict[str, torch.Tensor]:
    """A caption's fields under the names that they have in files of images or videos.

    Args:
        fields: What the processor made of the caption.
        media: ``image`` or ``video``.
    """
    named = dict(fields)
    if media == "image" or "text_embeddings" in named:
        return named
    # A processor that also encodes images uses their field names.
    text = named.pop("prompt_embeds")
    named.pop("pooled_prompt_embeds", None)
    return {"text_embeddings": text, **named}


def _prompts(sample: PlannedSample) -> SampleData:
    texts = sample.caption.texts
    return {"prompt": texts[0]} if len(texts) == 1 else {"prompt": texts[0], PROMPTS: list(texts)}


def sample_row(sample: PlannedSample, data: SampleData, source_digest: str, damage: str | None) -> Row:
    """The row of a sample, with what the next run needs to find out whether the input has changed.

    Its writer adds where the sample is stored, and a digest of the file.
    """
    return Row(
        cache_file="",
        image_path=data.get("image_path"),
        video_path=data.get("video_path"),
        bucket_resolution=sample.bucket.resolution,
        original_resolution=(sample.width, sample.height),
        prompt=sample.caption.text,
        prompts=sample.caption.texts if sample.caption.more else None,
        bucket_id=sample.bucket_id,
        aspect_ratio=data["aspect_ratio"],
        pixels=sample.bucket.width * sample.bucket.height,
        model_type=data["model_type"],
        num_frames=sample.bucket.num_frames,
        frame_index=data.get("frame_index"),
        total_frames_extracted=data.get("total_frames_extracted"),
        source_frame_index=data.get("source_frame_index"),
        window_index=data.get("window_index"),
        num_windows=data.get("num_windows"),
        window_start_s=data.get("window_start_s"),
        window_frames=data.get("window_frames"),
        sample_name=sample.name,
        caption_source=sample.caption.source,
        source_name=sample.file.name,
        source_bytes=sample.file.size_bytes,
        source_modified_ns=sample.file.modified_ns,
        source_digest=source_digest,
        damage=damage or "",
    )
