"""TIFF files that are compressed as JPEG: libtiff decodes damaged ones without an error."""

from __future__ import annotations

from PIL import Image, TiffImagePlugin

from latentry.media.formats.jpeg import hidden_damage, jpeg_damage
from latentry.media.formats.jpeg_header import parse_jpeg_header

_COMPRESSION, _JPEG, _JPEG_TABLES = 259, 7, 347
_PARTS = ((273, 279), (324, 325))
"""The tags of the offsets and the sizes of strips, and of tiles."""


def tiff_damage(content: bytes, image: Image.Image) -> str | None:
    """What is wrong with the JPEG data in a TIFF file; None if nothing, or if it has none.

    Args:
        content: The file.
        image: The same file, opened by Pillow.
    """
    if not isinstance(image, TiffImagePlugin.TiffImageFile) or image.tag_v2.get(_COMPRESSION) != _JPEG:
        return None
    tables = image.tag_v2.get(_JPEG_TABLES, b"")
    for offset_tag, size_tag in _PARTS:
        offsets, sizes = image.tag_v2.get(offset_tag, ()), image.tag_v2.get(size_tag, ())
        for offset, size in zip(offsets, sizes, strict=False):
            part = content[offset : offset + size]
            whole = tables[:-2] + part[2:] if tables else part  # one start marker, no end marker between
            header = parse_jpeg_header(whole)
            damage = jpeg_damage(whole) or (hidden_damage(whole, header) if header else None)
            if damage is not None:
                return damage
    return None
