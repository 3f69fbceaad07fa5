"""HEIC and JPEG XL, through the packages of ``latentry[formats]``."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from latentry.errors import MediaError, UnsuitableMediaError
from latentry.extras import missing_packages
from latentry.media.formats.header import exif_orientation
from latentry.media.pillow import check_num_pixels

_PACKAGES = {"HEIC": "pillow_heif", "JPEG XL": "pillow_jxl"}


class ExtraImage(NamedTuple):
    """An image of one of these formats, upright."""

    image: Image.Image | None
    """8-bit pixels; None if there are ``deep`` ones."""
    deep: npt.NDArray[np.floating[Any]] | None
    """Code values from 0 to 1, float32 [H,W,3] or [H,W,4]."""
    profile: bytes | None
    jpeg: bytes | None = None
    """The JPEG that a JPEG XL was made from, bit by bit. It replaces the others."""


def require_package(image_type: str) -> None:
    """Raise an ``UnsuitableMediaError`` if a file of this type cannot be read because a package is missing."""
    package = _PACKAGES.get(image_type)
    if package is not None and missing_packages("formats", [package]):
        raise UnsuitableMediaError(
            f"is {image_type}, which needs the package {package}; install it with: pip install 'latentry[formats]'"
        )


def heic_size(content: bytes) -> tuple[int, int]:
    """(width, height) of a HEIC image as it is shown."""
    import pillow_heif

    width, height = pillow_heif.open_heif(io.BytesIO(content)).size
    return width, height


def decode_heic(content: bytes, *, deep: bool) -> ExtraImage:
    """Decode the primary image of a HEIC file.

    Args:
        content: The file.
        deep: Keep all bits, for HDR.
    """
    import pillow_heif

    found = pillow_heif.open_heif(io.BytesIO(content), convert_hdr_to_8bit=not deep)
    check_num_pixels(*found.size)
    values = np.asarray(found)
    if values.dtype == np.uint16:
        return ExtraImage(None, values.astype(np.float32) / np.float32(65535), None)
    return ExtraImage(Image.fromarray(values), None, found.info.get("icc_profile"))


def jxl_size(content: bytes) -> tuple[int, int]:
    """(width, height) of a JPEG XL image as it is shown. Decodes it: there is no other way."""
    found = decode_jxl(content)
    if found.image is not None:
        return found.image.size
    with Image.open(io.BytesIO(found.jpeg or b"")) as image:
        turned = exif_orientation(image.info.get("exif", b"")) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size


def decode_jxl(content: bytes) -> ExtraImage:
    """Decode the first frame of a JPEG XL file."""
    # Importing the package also adds the format to Pillow's list. There is no other way to its decoder.
    import pillow_jxl

    try:
        is_jpeg, info, data, profile, _ = pillow_jxl.Decoder(num_threads=0)(content)
    except RuntimeError:
        raise MediaError("cannot be decoded: its JPEG XL data is damaged or cut") from None
    if is_jpeg:
        return ExtraImage(None, None, None, bytes(data))
    size = (info.width, info.height)
    if info.mode == "F;16":
        values = np.frombuffer(bytes(data), np.float16).reshape(size[::-1])
        return ExtraImage(Image.fromarray(values.astype(np.float32)), None, bytes(profile) or None)
    return ExtraImage(Image.frombytes(info.mode, size, bytes(data)), None, bytes(profile) or None)
