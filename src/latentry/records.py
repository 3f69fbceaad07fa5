"""The few frozen records that cross rooms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BucketShape:
    """What makes two samples stack: their size in pixels and, for video, their frames."""

    width: int
    height: int
    aspect_name: str
    """``tall``, ``square`` or ``wide``: part of the bucket's key in the documented interface."""
    num_frames: int | None = None
    """None for images."""

    @property
    def folder(self) -> str:
        """The folder inside a cache that holds this bucket's files."""
        return f"{self.width}x{self.height}"

    @property
    def pixels(self) -> int:
        return self.width * self.height
