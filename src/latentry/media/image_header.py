"""Headers of images: sizes for planning, without decoding pixels.

Each common format has a parser in ``latentry.media.formats``. Pillow reads the headers of the others, GIF and TIFF among
them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

from PIL import Image, UnidentifiedImageError

from latentry.errors import MediaError, UnsuitableMediaError
from latentry.media.formats.bitmap import read_bitmap_header
from latentry.media.formats.content_type import PREFIX_BYTES, image_type_of, other_type
from latentry.media.formats.extra_formats import heic_size, jxl_size, require_package
from latentry.media.formats.header import (
    ByteReader,
    ImageHeader,
    exif_orientation,
    file_reader,
    xmp_orientation,
)
from latentry.media.formats.heif_header import read_heif_header
from latentry.media.formats.jpeg_header import read_jpeg_header
from latentry.media.formats.jxl_header import read_jxl_header
from latentry.media.formats.png import read_png_header
from latentry.media.formats.webp import read_webp_header
from latentry.media.pillow import check_num_pixels, open_with_pillow

HEADER_READERS: dict[str, Callable[[ByteReader], ImageHeader | None]] = {
    "PNG": read_png_header,
    "WebP": read_webp_header,
    "BMP": read_bitmap_header,
    "AVIF": read_heif_header,
    "HEIC": read_heif_header,
    "JPEG XL": read_jxl_header,
}


def read_image_header(path: Path, hdr: str = "tonemap") -> ImageHeader:
    """Size, orientation and HDR format of an image, from its header.

    Args:
        path: The file.
        hdr: One of ``HDR_MODES``. With ``skip``, HDR images are refused.

    Raises:
        MediaError: The file cannot be read, is not an image, is too large, or is HDR and not wanted.
    """
    prefix = b""
    try:
        jpeg = read_jpeg_header(path)
        if jpeg is not None:
            header = ImageHeader(jpeg.width, jpeg.height, jpeg.orientation)
        else:
            with open(path, "rb") as file:
                prefix = file_reader(file)(0, PREFIX_BYTES)
                header = _read_header(file)
        check_num_pixels(header.width, header.height)
        check_hdr(header, hdr)
    except MediaError:
        raise
    except Exception as error:  # Pillow raises many types of errors for a damaged header
        raise MediaError(failure_reason(error, prefix)) from None
    return header


def _read_header(file: IO[bytes]) -> ImageHeader:
    """The header of an image that is not a plain JPEG, without decoding where its format allows."""
    read = file_reader(file)
    image_type = require_image(read(0, PREFIX_BYTES))
    if image_type in HEADER_READERS:
        header = HEADER_READERS[image_type](read)
        if header is not None:
            return header
    if image_type == "HEIC":
        return ImageHeader(*heic_size(file.read()))
    if image_type == "JPEG XL":
        return ImageHeader(*jxl_size(file.read()))
    with open_with_pillow(file) as image:
        return ImageHeader(image.width, image.height, pillow_orientation(image))


def require_image(prefix: bytes) -> str | None:
    """The type of a file, None if only Pillow may know; a ``MediaError`` if it is certainly no image."""
    image_type = image_type_of(prefix)
    if image_type is None:
        if not prefix:
            raise MediaError("is empty")
        other = other_type(prefix)
        if other is not None:
            hint = "; encode it with: latentry video" if "video" in other else ""
            raise MediaError(f"is {other}, not an image{hint}")
    else:
        require_package(image_type)
    return image_type


def check_hdr(header: ImageHeader, hdr: str) -> None:
    """Raise an ``UnsuitableMediaError`` if an image is HDR and ``hdr`` is ``skip``."""
    if header.hdr is not None and hdr == "skip":
        raise UnsuitableMediaError(
            f"is HDR ({header.hdr.transfer.upper()}); leave out --hdr skip to convert it to sRGB"
        )


def pillow_orientation(image: Image.Image) -> int:
    """The orientation of an image that Pillow opened, without decoding it. Pillow turns TIFF images itself."""
    if image.format == "TIFF":
        return 1
    exif = image.info.get("exif")
    found = exif_orientation(exif) if isinstance(exif, bytes) else 1
    xmp = image.info.get("xmp")
    return found if found != 1 or not isinstance(xmp, bytes) else xmp_orientation(xmp)


def failure_reason(error: Exception, prefix: bytes) -> str:
    """Why an image cannot be used, as the rest of a sentence that begins with its name.

    Args:
        error: What a library raised.
        prefix: The first ``PREFIX_BYTES`` bytes of the file.
    """
    if isinstance(error, UnidentifiedImageError):
        image_type = image_type_of(prefix)
        if image_type is not None:
            return f"cannot be decoded: its {image_type} data is damaged or cut"
        return "is not an image, or its format is unknown"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return f"cannot be decoded: {str(error) or type(error).__name__}".replace("\n", " ")
