"""Each format, the odd files that are good all the same, and what a file is by its content."""

from __future__ import annotations

import sys

import numpy as np
import pillow_jxl  # noqa: F401  adds JPEG XL to Pillow, for writing
import pytest
from image_files import (
    encoded,
    exif_with,
    grey_profile,
    heic,
    masked_bitmap,
    photo,
    png_chunk,
    webp_chunks,
    webp_of,
    with_png_chunk,
)
from PIL import Image, ImageFile

from latentry import Recipe, prepare
from latentry.errors import MediaError
from latentry.media.image_header import read_image_header
from latentry.media.image_reader import IMAGE_SUFFIXES, ImageReader
from latentry.media.images import decode_image
from latentry.testing import make_counter_clip

PHOTO = photo()
PIXELS = np.asarray(PHOTO)


LOSSLESS = {
    "PNG": encoded(PHOTO),
    "WebP": encoded(PHOTO, "WEBP", lossless=True),
    "BMP": encoded(PHOTO, "BMP"),
    "TIFF": encoded(PHOTO, "TIFF"),
    "TIFF, LZW": encoded(PHOTO, "TIFF", compression="tiff_lzw"),
    "lossless JPEG XL": encoded(PHOTO, "JXL", lossless=True),
    "JPEG XL in a container": encoded(PHOTO, "JXL", lossless=True, use_container=True),
}
LOSSY = {
    "JPEG": encoded(PHOTO, "JPEG", quality=97, subsampling=0),
    "AVIF": encoded(PHOTO, "AVIF", quality=97, subsampling="4:4:4"),
    "HEIC": heic(PHOTO, chroma=444),
    "JPEG XL": encoded(PHOTO, "JXL", quality=97),
    "GIF": encoded(PHOTO.quantize(256), "GIF"),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_formats(tmp_path, name):
    image = decode_image(LOSSLESS[name])
    assert image.damage is None
    assert np.array_equal(image.pixels, PIXELS)
    (tmp_path / "image").write_bytes(LOSSLESS[name])
    assert read_image_header(tmp_path / "image").shown_size == (160, 120)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_formats(tmp_path, name):
    image = decode_image(LOSSY[name])
    assert image.damage is None
    assert np.abs(image.pixels.astype(int) - PIXELS).mean() < (12 if name == "GIF" else 6)
    (tmp_path / "image").write_bytes(LOSSY[name])
    assert read_image_header(tmp_path / "image").shown_size == (160, 120)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    "name", ["PNG", "PNG, EXIF behind the pixels", "WEBP", "TIFF", "AVIF", "HEIC", "JXL from JPEG"]
)
def test_orientation(tmp_path, name, orientation):
    exif = exif_with(orientation)
    upright = np.asarray(PHOTO)
    if orientation in (5, 6, 7, 8):
        upright = upright.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        upright = upright[:, ::-1]
    if orientation in (3, 4, 7, 8):
        upright = upright[::-1]
    if name == "PNG, EXIF behind the pixels":
        content = with_png_chunk(encoded(PHOTO), b"eXIf", exif[6:], after_pixels=True)
    elif name == "HEIC":
        content = heic(PHOTO, exif=exif)
    elif name == "JXL from JPEG":
        path = tmp_path / "photo.jpg"
        path.write_bytes(encoded(PHOTO, "JPEG", quality=97, exif=exif))
        with Image.open(path) as image:
            content = encoded(image, "JXL", lossless_jpeg=True)
    elif name == "TIFF":
        content = encoded(PHOTO, "TIFF", tiffinfo={0x0112: orientation})
    else:
        options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 95}}.get(name, {})
        content = encoded(PHOTO, name, exif=exif, **options)
    (tmp_path / "image").write_bytes(content)
    pixels = decode_image(content).pixels
    assert pixels.shape == upright.shape
    assert np.abs(pixels.astype(int) - upright).mean() < 5
    assert read_image_header(tmp_path / "image").shown_size == (upright.shape[1], upright.shape[0])


# ---- good files that were refused ------------------------------------------------------------


BROKEN_EXIF = {"not a TIFF": b"not a TIFF file", "empty": b"", "cut": exif_with(6)[6:20], "zeros": bytes(40)}


@pytest.mark.parametrize("name", BROKEN_EXIF)
@pytest.mark.parametrize("after_pixels", [False, True])
def test_png_with_broken_exif(tmp_path, name, after_pixels):
    content = with_png_chunk(encoded(PHOTO), b"eXIf", BROKEN_EXIF[name], after_pixels=after_pixels)
    assert_good(tmp_path, content)


@pytest.mark.parametrize("name", BROKEN_EXIF)
def test_webp_with_broken_exif(tmp_path, name):
    (kind, data), *others = webp_chunks(encoded(PHOTO, "WEBP", lossless=True, exif=exif_with(1)))
    assert kind == b"VP8X"
    chunks = [(k, BROKEN_EXIF[name] if k == b"EXIF" else d) for k, d in others]
    assert_good(tmp_path, webp_of([(kind, data), *chunks]))


def test_png_with_megabytes_of_text(tmp_path):
    text = png_chunk(b"tEXt", b"prompt\0" + b"x" * (2 << 20))
    compressed = encoded(PHOTO, pnginfo=_text(9 << 20))
    for content in (encoded(PHOTO)[:33] + text + encoded(PHOTO)[33:], compressed):
        assert_good(tmp_path, content)


def _text(size: int):
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("workflow", "y" * size, zip=True)
    return info


def test_png_with_a_wrong_checksum_of_its_text(tmp_path):
    chunk = bytearray(png_chunk(b"tEXt", b"a\0b"))
    chunk[-1] ^= 1
    content = encoded(PHOTO)
    assert_good(tmp_path, content[:33] + bytes(chunk) + content[33:])


@pytest.mark.parametrize("flag", [0x20, 0x08, 0x04, 0x2C], ids=["profile", "EXIF", "XMP", "all"])
def test_webp_that_promises_metadata_it_does_not_have(tmp_path, flag):
    pixel_chunks = [
        chunk for chunk in webp_chunks(encoded(PHOTO, "WEBP", lossless=True)) if chunk[0] == b"VP8L"
    ]
    header = bytes([flag, 0, 0, 0]) + (159).to_bytes(3, "little") + (119).to_bytes(3, "little")
    assert_good(tmp_path, webp_of([(b"VP8X", header), *pixel_chunks]))


def test_webp_that_is_cut_in_its_metadata(tmp_path):
    content = encoded(PHOTO, "WEBP", lossless=True, xmp=b"x" * 3000)
    assert_good(tmp_path, content[:-2000])


MASKS = {
    "RGBX": (0xFF000000, 0xFF0000, 0xFF00, 0),
    "XBGR": (0xFF, 0xFF00, 0xFF0000, 0),
    "XRGB": (0xFF0000, 0xFF00, 0xFF, 0),
    "ARGB": (0xFF0000, 0xFF00, 0xFF, 0xFF000000),
    "RGBA": (0xFF000000, 0xFF0000, 0xFF00, 0xFF),
    "10 bits": (0x3FF00000, 0xFFC00, 0x3FF, 0),
    "mixed": (0xFF00, 0xFF000000, 0xFF, 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_bitmap_with_bit_fields(tmp_path, name):
    opaque = np.concatenate([PIXELS, np.full((120, 160, 1), 255, np.uint8)], axis=2)
    assert_good(tmp_path, masked_bitmap(opaque, MASKS[name]))


def test_bitmap_with_sixteen_bits_per_pixel(tmp_path):
    content = masked_bitmap(PIXELS, (0xF000, 0x0F00, 0x00F0, 0), num_bits=16)
    assert np.abs(decode_image(content).pixels.astype(int) - PIXELS).max() <= 9


def test_bitmap_with_transparency():
    clear = np.zeros((4, 4, 4), np.uint8)
    clear[0] = (255, 0, 0, 255)
    pixels = decode_image(masked_bitmap(clear, MASKS["RGBA"])).pixels
    assert pixels[0, 0].tolist() == [255, 0, 0]
    assert pixels[1, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("masks", [(0, 0xFF00, 0xFF, 0), (0xF0F0000, 0xFF00, 0xFF, 0)])
def test_bitmap_with_masks_that_make_no_sense(masks):
    with pytest.raises(MediaError, match="bit mask in its header"):
        decode_image(masked_bitmap(PIXELS, masks))


def assert_good(tmp_path, content: bytes) -> None:
    image = decode_image(content)
    assert image.damage is None
    assert np.array_equal(image.pixels, PIXELS)
    (tmp_path / "image").write_bytes(content)
    assert read_image_header(tmp_path / "image").shown_size == (160, 120)


# ---- profiles --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grey_with_a_profile(kind):
    """A linear profile: 55 of 255 in linear light is 128 in sRGB."""
    deep = Image.fromarray(np.full((8, 8), 55 * 257, np.uint16))
    plain = decode_image(encoded(deep, kind))
    assert plain.pixels[0, 0].tolist() == [55, 55, 55]
    profiled = decode_image(encoded(deep, kind, icc_profile=grey_profile(1.0)))
    assert profiled.pixels[0, 0].tolist() == [128, 128, 128]


def test_eight_bit_grey_with_a_profile():
    flat = Image.new("L", (16, 16), 55)
    for content in (
        encoded(flat, "PNG", icc_profile=grey_profile(1.0)),
        encoded(flat, "JPEG", quality=100, icc_profile=grey_profile(1.0)),
    ):
        assert np.abs(decode_image(content).pixels[0, 0].astype(int) - 128).max() <= 1


# ---- what a file is --------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".jpg", ".png", ".webp", ".gif", ".heic", ".tiff"])
def test_a_file_is_what_its_content_says(tmp_path, ending):
    for name, content in {**LOSSLESS, **LOSSY}.items():
        path = tmp_path / f"image{ending}"
        path.write_bytes(content)
        reader = ImageReader("center")
        assert path.suffix in reader.suffixes
        found = reader.probe(path)
        assert (found.width, found.height) == (160, 120), name
        assert decode_image(reader.load(path).content).damage is None


def test_endings():
    assert {".gif", ".tif", ".tiff", ".avif", ".jxl", ".heic", ".heif", ".jfif", ".jpe"} <= IMAGE_SUFFIXES


OTHERS = {
    "video": (None, r"^is a video \(MP4 or QuickTime\), not an image; encode it with: latentry video$"),
    "HTML": (b"<!DOCTYPE html><html>not found</html>", "^is an HTML page, not an image$"),
    "PDF": (b"%PDF-1.7 ...", "^is a PDF document, not an image$"),
    "SVG": (b'<?xml version="1.0"?><svg/>', "^is an XML document, not an image$"),
    "PostScript": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "^is a PostScript document, not an image$",
    ),
    "nothing": (b"", "^is empty$"),
    "text": (b"hello", "^is not an image, or its format is unknown$"),
    "Matroska": (b"\x1aE\xdf\xa3" + bytes(60), r"^is a video \(Matroska or WebM\), not an image"),
    "AVI": (b"RIFF\0\0\0\0AVI LIST" + bytes(60), r"^is a video \(AVI\), not an image"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_that_are_no_images(tmp_path, name):
    content, reason = OTHERS[name]
    path = tmp_path / "image.jpg"
    if content is None:
        make_counter_clip(tmp_path / "clip.mp4", 5).rename(path)
        content = path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(MediaError, match=reason):
        read_image_header(path)
    with pytest.raises(MediaError, match=reason):
        decode_image(content)


# ---- animation, the extra, planning ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_animation_gives_its_first_frame(kind):
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.abs(decode_image(content).pixels[8, 8].astype(int) - (255, 0, 0)).max() <= 6


@pytest.mark.parametrize(("kind", "package"), [("HEIC", "pillow_heif"), ("JPEG XL", "pillow_jxl")])
def test_files_that_need_the_extra(tmp_path, monkeypatch, kind, package):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_bytes(encoded(PHOTO))
    (folder / "b.jpg").write_bytes(LOSSY[kind])
    monkeypatch.setitem(sys.modules, package, None)  # how Python marks a module that cannot be imported
    reason = f"is {kind}, which needs the package {package}; install it with: pip install 'latentry[formats]'"
    result = prepare(Recipe(max_pixels=64 * 64), image_dir=folder, output_dir=tmp_path / "cache")
    assert [(failure.name, failure.reason) for failure in result.failures] == [("b.jpg", reason)]
    with pytest.raises(MediaError, match="which needs the package"):
        decode_image(LOSSY[kind])


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_planning_decodes_nothing(tmp_path, monkeypatch, name):
    """Not even where EXIF data may come behind the pixels."""
    path = tmp_path / "image"
    path.write_bytes({**LOSSLESS, **LOSSY}[name])

    def fail(*_, **__):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    monkeypatch.setattr("latentry.media.formats.extra_formats.decode_jxl", fail)
    monkeypatch.setattr("pillow_heif.open_heif", fail)
    assert read_image_header(path).shown_size == (160, 120)


def test_pillow_stays_as_it_is():
    """Reading HEIC adds nothing to Pillow, and damaged files do not switch its global tolerance on."""
    decode_image(LOSSY["HEIC"])
    decode_image(LOSSLESS["PNG"][:2000])
    assert "HEIF" not in Image.OPEN
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
