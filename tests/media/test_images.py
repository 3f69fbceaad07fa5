from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from helpers import EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps

from latentry.crops import covering_size
from latentry.errors import MediaError
from latentry.media.image_header import read_image_header
from latentry.media.images import decode_image, fit_to_bucket


def pixels_of(content: bytes) -> np.ndarray:
    """The pixels of an image that is not damaged."""
    image = decode_image(content)
    assert image.damage is None
    return image.pixels


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


@pytest.fixture
def photo():
    return Image.open(EXAMPLES / "home" / "coffee.png").convert("RGB")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_orientation_is_applied(photo, tmp_path, orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if kind != "PNG" else {}
    content = encoded(photo.resize((90, 60)), kind, exif=exif, **options)
    path = tmp_path / "image"
    path.write_bytes(content)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
    pixels = pixels_of(content)
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() <= 3
    assert read_image_header(path).shown_size == (pixels.shape[1], pixels.shape[0])


def test_transparency_becomes_white():
    half = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    half.paste((255, 0, 0, 255), (0, 0, 4, 8))
    half.putpixel((7, 7), (0, 0, 0, 128))
    for image, kind in ((half, "PNG"), (half, "WEBP"), (half.quantize(16), "PNG")):
        pixels = pixels_of(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})))
        assert pixels[0, 0].tolist() == [255, 0, 0]
        assert pixels[0, 6].tolist() == [255, 255, 255]
    assert pixels_of(encoded(half))[7, 7].tolist() == [127, 127, 127]
    grey = Image.merge("LA", [Image.new("L", (4, 4), 9), Image.new("L", (4, 4), 0)])
    assert pixels_of(encoded(grey))[0, 0].tolist() == [255, 255, 255]
    keyed = Image.new("RGB", (4, 4), (1, 2, 3))
    assert pixels_of(encoded(keyed, transparency=(1, 2, 3)))[0, 0].tolist() == [255, 255, 255]


def test_pixel_modes():
    grey = Image.linear_gradient("L")
    assert (pixels_of(encoded(grey))[:, 0, 0] == np.arange(256)).all()
    assert (
        np.abs(pixels_of(encoded(grey, "JPEG", quality=100))[:, 0, 1].astype(int) - np.arange(256)).max() <= 2
    )
    deep = Image.fromarray((np.arange(256, dtype=np.uint16) * 257).reshape(16, 16))
    assert (pixels_of(encoded(deep)).reshape(-1, 3)[:, 2] == np.arange(256)).all()
    bits = Image.new("1", (4, 4), 1)
    assert (pixels_of(encoded(bits)) == 255).all()
    palette = Image.new("RGB", (4, 4), (10, 200, 30)).quantize(4)
    assert pixels_of(encoded(palette))[0, 0].tolist() == [10, 200, 30]
    ink = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = pixels_of(encoded(ink, "JPEG", quality=100))[4, 4]
    assert red[0] > 200
    assert red[1] < 60
    assert pixels_of(encoded(Image.new("RGB", (5, 3), "blue"), "BMP"))[0, 0].tolist() == [0, 0, 255]


def test_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green", "blue")]
    for kind in ("WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert pixels_of(content)[0, 0].tolist() == [255, 0, 0]


def test_colour_profile_is_applied():
    content = encoded(
        Image.new("RGB", (8, 8), (200, 100, 50)), "JPEG", quality=100, icc_profile=_wide_profile()
    )
    plain = encoded(Image.new("RGB", (8, 8), (200, 100, 50)), "JPEG", quality=100)
    wide, narrow = pixels_of(content)[4, 4].astype(int), pixels_of(plain)[4, 4].astype(int)
    assert np.abs(narrow - (200, 100, 50)).max() <= 2
    assert wide[0] > narrow[0] + 10, "the same numbers mean a stronger red in a wider gamut"
    damaged = encoded(Image.new("RGB", (8, 8), (200, 100, 50)), "PNG", icc_profile=b"not a profile")
    assert pixels_of(damaged)[4, 4].tolist() == [200, 100, 50]


def _wide_profile() -> bytes:
    """sRGB with the red and green primaries of a wider space, written into its tags."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())

    def set_xyz(tag: bytes, xyz: tuple[float, float, float]) -> None:
        count = int.from_bytes(profile[128:132], "big")
        for i in range(count):
            entry = 132 + 12 * i
            if profile[entry : entry + 4] == tag:
                offset = int.from_bytes(profile[entry + 4 : entry + 8], "big")
                for j, value in enumerate(xyz):
                    start = offset + 8 + 4 * j
                    profile[start : start + 4] = round(value * 65536).to_bytes(4, "big", signed=True)
                return
        raise AssertionError(tag)

    set_xyz(b"rXYZ", (0.6097, 0.3111, 0.0195))  # Adobe RGB (1998), adapted to D50
    set_xyz(b"gXYZ", (0.2053, 0.6257, 0.0609))
    set_xyz(b"bXYZ", (0.1492, 0.0632, 0.7446))
    return bytes(profile)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        encoded(Image.new("RGB", (64, 64), "red"), "JPEG")[:200],
        encoded(Image.effect_noise((64, 64), 9))[:20],
    ],
    ids=["empty", "text", "cut JPEG", "cut PNG"],
)
def test_damaged_images_raise_media_errors(content):
    with pytest.raises(MediaError) as raised:
        pixels_of(content)
    assert "\n" not in str(raised.value)


def test_slightly_damaged_jpeg_is_read(photo):
    content = encoded(photo.resize((64, 64)), "JPEG", quality=95)
    start = content.index(b"\xff\xc0")
    odd = content[:start] + b"\x00\x00" + content[start:]
    assert np.abs(pixels_of(odd).astype(int) - pixels_of(content)).max() <= 3


def test_sixteen_bit_transparency():
    deep = Image.fromarray(np.full((4, 4), 1000, dtype=np.uint16))
    assert (pixels_of(encoded(deep, transparency=1000)) == 255).all()
    assert (pixels_of(encoded(deep, transparency=7)) == round(1000 / 257)).all()


# ---- fit_to_bucket --------------------------------------------------------------------------


def test_fit_to_bucket_agrees_with_pillow(photo):
    pixels = np.array(photo)
    window, offset = fit_to_bucket(pixels, (256, 192))
    assert window.dtype == torch.uint8
    assert window.shape == (3, 192, 256)
    scaled = photo.resize(covering_size(photo.size, (256, 192)), Image.Resampling.BICUBIC)
    left, top = offset
    expected = np.asarray(scaled.crop((left, top, left + 256, top + 192)))
    difference = np.abs(window.permute(1, 2, 0).numpy().astype(int) - expected)
    assert difference.max() <= 2
    assert difference.mean() < 0.2


@settings(max_examples=50, deadline=None)
@given(
    size=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    mode=st.sampled_from(["center", "random", "smart"]),
)
def test_fit_to_bucket_fills_the_bucket(size, mode):
    window, _ = fit_to_bucket(np.full((size[1], size[0], 3), 200, np.uint8), (128, 64), mode, seed=1)
    assert window.shape == (3, 64, 128)
    assert (window == 200).all()


def test_fast_jpeg_decoder_agrees_with_pillow(photo):
    content = encoded(photo, "JPEG", quality=92)
    slow = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert np.abs(pixels_of(content).astype(int) - slow).max() <= 3


def test_pillow_decodes_what_the_fast_decoder_refuses(monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(Image.new("RGB", (40, 30), "grey"), "JPEG", exif=exif)
    expected = pixels_of(content)

    def fail(*_, **__):
        raise RuntimeError("no")

    monkeypatch.setattr("latentry.media.formats.jpeg.simplejpeg.decode_jpeg", fail)
    assert np.abs(pixels_of(content).astype(int) - expected).max() <= 2
    with pytest.raises(MediaError, match="cannot be decoded"):
        pixels_of(content[: len(content) // 2])
