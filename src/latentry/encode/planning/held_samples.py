"""What the cache already holds of an input: the sample itself, or everything but its captions.

If only the captions of a sample have changed, its latents and all else that depends on pixels are taken from the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latentry.cache.format import Row
from latentry.sources.folder import SourceFolders
from latentry.storage import content_digest
from latentry.types import Caption, PlannedSample, SourceFile


def is_same_media(row: Row, num_known: int | None, file: SourceFile, source: SourceFolders) -> bool:
    """Whether size and time of the input are the same; if only the time differs, the content is compared.

    With ``num_known``, also whether all samples of the file are there.
    """
    if row.source_bytes != file.size_bytes:
        return False
    if num_known is not None and row.num_samples != num_known:
        return False
    if row.source_modified_ns == file.modified_ns:
        return True
    try:
        return row.source_digest == content_digest(source.path(file.name))
    except OSError:
        return False


def has_captions(row: Row, caption: Caption) -> bool:
    """Whether the sample was encoded with these captions."""
    return (row.prompts or (row.prompt,)) == caption.texts


def planned_sample(
    row: Row, file: SourceFile, caption: Caption, *, stored_row: Mapping[str, Any] | None = None
) -> PlannedSample:
    """The sample as it was planned, with this caption.

    Args:
        row: The sample's row.
        file: Its input.
        caption: Its captions now.
        stored_row: See ``PlannedSample``.
    """
    width, height = row.original_resolution or (0, 0)
    return PlannedSample(
        file,
        caption,
        width=width,
        height=height,
        bucket_id=row.bucket_id if isinstance(row.bucket_id, int) else None,
        bucket=row.bucket,
        number=row.number,
        num_samples=row.num_samples,
        window=row.window,
        stored_row=stored_row,
    )
