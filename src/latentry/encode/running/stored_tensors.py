"""What is taken from the cache of a sample whose captions alone have changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from latentry.cache.caption_keys import split_caption_key
from latentry.errors import CacheFileError

_LATENTS = ("latent", "video_latents")
_FIRST_FRAME = "first_frame"
_NO_FRAME = torch.empty((3, 1, 0, 0), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The results of an earlier run that depend on pixels."""

    latent: torch.Tensor
    """As ``Processor.encode_pixels`` returned it, without the batch dimension."""
    first_frame: torch.Tensor
    """uint8 [3,1,H,W], as if the clip had one frame. Empty for images, and in frames mode."""
    offset: tuple[int, int]
    source_frame: int | None
    others: Mapping[str, torch.Tensor]
    """All other tensors. Those of the old captions are among them."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> StoredTensors:
        """What a sample's dictionary holds. Raises ``CacheFileError`` if something is missing."""
        try:
            latent = data["latent"] if "latent" in data else data["video_latents"][0]
            left, top = data["crop_offset"]
            frame = data.get(_FIRST_FRAME)
            return cls(
                latent,
                _NO_FRAME if frame is None else frame.permute(2, 0, 1)[:, None],
                (int(left), int(top)),
                data.get("source_frame_index"),
                {
                    key: value
                    for key, value in data.items()
                    if isinstance(value, torch.Tensor) and key not in (*_LATENTS, _FIRST_FRAME)
                },
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CacheFileError(f"its file in the cache is incomplete: {error!r}") from None

    def without_captions(self, text_keys: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors that belong to no caption, if captions have these keys."""
        return {
            key: value for key, value in self.others.items() if split_caption_key(key)[0] not in text_keys
        }
