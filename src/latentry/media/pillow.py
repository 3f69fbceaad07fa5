"""Opening images with Pillow under a pixel limit of our own.

``Image.open`` checks sizes against ``Image.MAX_IMAGE_PIXELS``. That global belongs to the application: setting it
would change the limit for every other thread and library, and depending on it would make our results depend on
them. Here the plugins that are registered with Pillow are called directly and sizes are checked by us. A few
plugins also read the global limit themselves, WebP's among them; those run with our check in its place.
"""

from __future__ import annotations

import functools
import inspect
import io
import struct
from collections.abc import Callable
from types import FunctionType
from typing import IO, Any

from PIL import Image, ImageFile, UnidentifiedImageError

from latentry.errors import MediaError
from latentry.media.formats.tiff import tiff_damage

MAX_PIXELS = 1 << 29
"""Half a gigapixel. A larger image is treated as a decompression bomb."""
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM", "JPEG2000")
"""The plugins that are used, in this order. Others are slow, start other programs or read what nobody trains on."""
_NO_PARTS = ("WEBP", "AVIF")
"""The formats whose decoders give all pixels or none. libtiff does too, except for JPEG data."""
_PILLOW_CHECK = "_decompression_bomb_check"


def check_num_pixels(width: int, height: int) -> None:
    """Raise a ``MediaError`` if an image of this size is too large to read."""
    if width * height > MAX_PIXELS:
        raise MediaError(f"is {width}x{height}; at most {MAX_PIXELS} pixels can be read")


def open_with_pillow(file: IO[bytes], name: str = "") -> Image.Image:
    """``Image.open`` for an open file, with our pixel limit instead of the global one.

    Args:
        file: A seekable file or buffer. It must stay open while the image is in use.
        name: Its path, where it has one.

    Raises:
        UnidentifiedImageError: The content is not an image, or its format is unknown.
        MediaError: The image has more than ``MAX_PIXELS`` pixels.
    """
    file.seek(0)
    prefix = file.read(16)
    unsupported = None
    for load_plugins in (Image.preinit, Image.init):  # the common formats first: loading all of them is slow
        load_plugins()
        for format_name in FORMATS:
            if format_name not in Image.OPEN:
                continue
            opener, accepts = Image.OPEN[format_name]
            try:
                accepted = accepts is None or accepts(prefix)
                if isinstance(accepted, str):
                    unsupported = accepted
                elif accepted:
                    file.seek(0)
                    image: Image.Image = _with_our_limit(opener)(file, name)
                    check_num_pixels(*image.size)
                    return image
            except (SyntaxError, IndexError, TypeError, struct.error):
                continue  # how plugins say that a file is not theirs
        if all(format_name in Image.OPEN for format_name in FORMATS):
            break
    if unsupported is not None:
        raise ValueError(unsupported)
    raise UnidentifiedImageError("no plugin accepts the file")


def load_with_pillow(content: bytes) -> tuple[Image.Image, str | None]:
    """Open and decode the first frame of an image; also returns what is wrong with its data, None if nothing.

    Args:
        content: The bytes of the file.

    Raises:
        Exception: Nothing can be decoded. Pillow raises many types of errors.
    """
    image = open_with_pillow(io.BytesIO(content))
    try:
        image.seek(0)
        tiff = tiff_damage(content, image)  # before loading, which forgets where the data is
        image.load()
        return image, tiff
    except (OSError, SyntaxError, ValueError) as error:
        damage = (str(error) or type(error).__name__).replace("\n", " ")
        image.close()
        if getattr(image, "use_load_libtiff", image.format in _NO_PARTS):
            raise
    image = open_with_pillow(io.BytesIO(content))
    assert isinstance(image, ImageFile.ImageFile)
    _tolerant_load()(image)
    return image, damage


@functools.cache
def _tolerant_load() -> Callable[[ImageFile.ImageFile], Any]:
    """``ImageFile.load``, except that it keeps what it decoded before the data ends or an error occurs.

    Pillow has a global switch for that, which would change it for every other thread and library.
    """
    load = ImageFile.ImageFile.load
    scope = {**load.__globals__, "LOAD_TRUNCATED_IMAGES": True}
    return FunctionType(load.__code__, scope, "load", load.__defaults__, load.__closure__)


class _LimitedImageModule:
    """``PIL.Image`` as a plugin sees it, except that the size check is ours."""

    def __getattr__(self, name: str) -> Any:
        return getattr(Image, name)

    @staticmethod
    def _decompression_bomb_check(size: tuple[int, int], **_: Any) -> None:
        check_num_pixels(*size)


@functools.cache
def _with_our_limit(opener: Callable[..., Any]) -> Callable[..., Any]:
    """A plugin's opener; if it is a class that reads Pillow's limit, a subclass that reads ours.

    The methods in question are copied with another ``Image`` among their globals. Pillow itself is not changed.
    """
    if not isinstance(opener, type):
        return opener
    methods = {}
    for name, method in inspect.getmembers(opener, inspect.isfunction):
        if {_PILLOW_CHECK, "Image"} <= set(method.__code__.co_names):
            scope = {**method.__globals__, "Image": _LimitedImageModule()}
            copy = FunctionType(method.__code__, scope, name, method.__defaults__, method.__closure__)
            copy.__kwdefaults__ = method.__kwdefaults__
            methods[name] = copy
    return type(opener)(opener.__name__, (opener,), methods) if methods else opener
