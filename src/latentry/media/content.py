"""A media file and the digest of its content, from one read.

The bytes that are hashed must be the bytes that are decoded: if a file is replaced between two reads, a cache would
record pixels of one file under the digest of another. So a file is read once and decoded from memory. Videos of
more than 64 MB are the exception: they are not held in memory, their digest covers samples only, and they are
decoded from their path.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from latentry.storage import open_file_digest, parts_digest


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A file that is ready to be decoded."""

    path: Path
    digest: str
    """What ``content_digest`` gives for the file."""
    content: bytes | None = field(repr=False)
    """The bytes that the digest was computed from; None for a large video, which is decoded from ``path``."""


def read_media_file(path: Path, max_bytes: int | None = None) -> MediaFile:
    """Read a file once: ``read_media_file(Path("photo.jpg")).digest``.

    Args:
        path: The file.
        max_bytes: Larger files are not kept in memory; None for no limit.
    """
    with open(path, "rb") as file:
        if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
            return MediaFile(path, open_file_digest(file), None)
        content = file.read()
    return MediaFile(path, parts_digest([content]), content)
