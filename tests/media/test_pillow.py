"""Pillow's global pixel limit: we neither change it nor depend on it."""

from __future__ import annotations

import io
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from latentry.errors import MediaError
from latentry.media.image_header import read_image_header
from latentry.media.images import decode_image

PHOTO = Image.effect_mandelbrot((120, 90), (-2, -1.5, 1, 1.5), 20).convert("RGB")
PROFILE = b"\0" * 200
FORMATS = {
    "JPEG": {"icc_profile": PROFILE},  # a profile, so that Pillow decodes it
    "MPO": {"icc_profile": PROFILE},
    "PNG": {},
    "WEBP": {"lossless": True},
    "BMP": {},
    "GIF": {},
    "TIFF": {"compression": "tiff_lzw"},
    "PPM": {},
}


def pixels_of(content: bytes) -> np.ndarray:
    """The pixels of an image that is not damaged."""
    image = decode_image(content)
    assert image.damage is None
    return image.pixels


def encoded(image: Image.Image, image_format: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **FORMATS[image_format])
    return buffer.getvalue()


def header_of(width: int, height: int) -> bytes:
    """A PNG of this size without image data. Its EXIF chunk keeps Pillow from looking for one behind the data."""
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG", exif=exif)
    content = bytearray(buffer.getvalue())
    content[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


def test_global_limit_is_unchanged(tmp_path, monkeypatch):
    before = Image.MAX_IMAGE_PIXELS
    (tmp_path / "large.png").write_bytes(header_of(20_000, 10_000))
    assert read_image_header(tmp_path / "large.png").shown_size == (10_000, 20_000)
    assert before == Image.MAX_IMAGE_PIXELS
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    pixels_of(encoded(PHOTO, "PNG"))
    assert Image.MAX_IMAGE_PIXELS == 1000


@pytest.mark.parametrize("image_format", FORMATS)
@pytest.mark.parametrize("limit", [8000, 100], ids=["warns", "refuses"])
def test_lowered_global_limit_has_no_effect(tmp_path, monkeypatch, image_format, limit):
    content = encoded(PHOTO, image_format)
    (tmp_path / "image").write_bytes(content)
    expected = pixels_of(content)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises((Image.DecompressionBombError, Image.DecompressionBombWarning)):
        Image.open(io.BytesIO(content)).load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_image_header(tmp_path / "image").shown_size == (120, 90)
        assert np.array_equal(pixels_of(content), expected)


@pytest.mark.parametrize("image_format", FORMATS)
def test_pixels_equal_those_of_image_open(image_format):
    content = encoded(PHOTO, image_format)
    assert np.array_equal(pixels_of(content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


@pytest.mark.parametrize("image_format", [*FORMATS, "plain JPEG"])
def test_images_over_our_limit_are_refused(tmp_path, monkeypatch, image_format):
    if image_format == "plain JPEG":
        buffer = io.BytesIO()
        PHOTO.save(buffer, "JPEG")
        content = buffer.getvalue()
    else:
        content = encoded(PHOTO, image_format)
    (tmp_path / "image").write_bytes(content)
    monkeypatch.setattr("latentry.media.pillow.MAX_PIXELS", 1000)
    with pytest.raises(MediaError, match=r"^is 120x90; at most 1000 pixels can be read$"):
        pixels_of(content)
    with pytest.raises(MediaError, match=r"^is 120x90; at most 1000 pixels can be read$"):
        read_image_header(tmp_path / "image")


def test_decompression_bombs_are_refused(tmp_path):
    (tmp_path / "bomb.png").write_bytes(header_of(60_000, 60_000))
    with pytest.raises(MediaError, match="is 60000x60000; at most"):
        read_image_header(tmp_path / "bomb.png")
    with pytest.raises(MediaError, match="is 60000x60000; at most"):
        pixels_of(header_of(60_000, 60_000))


def test_webp_bomb_is_refused_before_its_canvas_is_allocated():
    """A 40-byte header may claim 16,000 million pixels; the decoder would allocate them."""
    size = (1 << 17) - 1
    chunk = b"VP8X" + (10).to_bytes(4, "little") + bytes(4) + 2 * size.to_bytes(3, "little")
    content = b"RIFF" + (len(chunk) + 4).to_bytes(4, "little") + b"WEBP" + chunk
    with pytest.raises(MediaError, match=r"is 131072x131072; at most|cannot be decoded: could not create"):
        pixels_of(content)


def test_format_without_support_is_named(monkeypatch):
    """Pillow can be built without WebP; then its plugin answers with a message instead of True."""
    Image.init()
    opener, _ = Image.OPEN["WEBP"]
    monkeypatch.setitem(Image.OPEN, "WEBP", (opener, lambda prefix: "WEBP support not installed"))
    with pytest.raises(MediaError, match=r"^cannot be decoded: WEBP support not installed$"):
        pixels_of(encoded(PHOTO, "WEBP"))
