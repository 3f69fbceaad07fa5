from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from latentry.media.formats.jpeg_header import parse_jpeg_header, read_jpeg_header
from latentry.media.image_header import read_image_header


def jpeg(size=(40, 30), mode="RGB", exif: bytes | None = None, **options) -> bytes:
    output = io.BytesIO()
    Image.new(mode, size, 128).save(output, "JPEG", **({"exif": exif} if exif else {}), **options)
    return output.getvalue()


def exif_with(orientation: int, padding: int = 0, motorola: bool = False) -> bytes:
    exif = Image.Exif()
    exif.endian = ">" if motorola else "<"
    exif[0x0112] = orientation
    exif[0x010F] = "maker" + "x" * padding
    return exif.tobytes()


def exif_block(value_type: int, count: int, value: bytes, magic: bytes = b"II*\0") -> bytes:
    """EXIF data with nothing but an orientation."""
    entry = struct.pack("<HHI", 0x0112, value_type, count) + value.ljust(4, b"\0")
    return b"Exif\0\0" + magic + struct.pack("<IH", 8, 1) + entry + b"\0" * 4


UNUSUAL_ORIENTATIONS = {
    "long": exif_block(4, 1, b"\6"),
    "byte": exif_block(1, 1, b"\6"),
    "none": exif_block(3, 0, b"\6"),
    "several": exif_block(3, 2, b"\6"),
    "magic": exif_block(3, 1, b"\6", magic=b"II\0*"),
    "doubled": b"Exif\0\0" + exif_block(3, 1, b"\6"),
    "short": exif_block(3, 1, b"\6")[:20],
}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("name", UNUSUAL_ORIENTATIONS)
def test_unusual_orientations_are_left_to_pillow(name, tmp_path):
    path = tmp_path / "x.jpg"
    path.write_bytes(jpeg(exif=UNUSUAL_ORIENTATIONS[name]))
    assert read_jpeg_header(path) is None
    with Image.open(path) as image:
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    assert read_image_header(path).shown_size == ((30, 40) if turned else (40, 30))


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="6"/>'
HEADERS = {
    "plain": jpeg(),
    "grey": jpeg(mode="L"),
    "cmyk": jpeg(mode="CMYK"),
    "progressive": jpeg((300, 200), progressive=True),
    "optimised": jpeg(optimize=True),
    "icc": jpeg(icc_profile=b"\0" * 70_000),
    "long exif": jpeg(exif=exif_with(6, padding=60_000)),
    "motorola": jpeg(exif=exif_with(8, motorola=True)),
    "turned in xmp": jpeg(xmp=XMP),
    "turned in both": jpeg(exif=exif_with(3), xmp=XMP),
    "comment": jpeg(comment=b"\xff\xda\xff\xc0" * 10),
    **{f"orientation {n}": jpeg(exif=exif_with(n)) for n in range(0, 10)},
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_agree_with_pillow(name, tmp_path):
    path = tmp_path / "x.jpg"
    path.write_bytes(HEADERS[name])
    with Image.open(path) as image:
        expected = (*image.size, image.getexif().get(0x0112, 1))
    header = read_jpeg_header(path)
    assert header == parse_jpeg_header(HEADERS[name])
    assert (header is None) == ("in xmp" in name)
    if header is not None:
        assert header[:3] == expected
        assert (header.num_components, header.has_profile) == (
            {"L": 1, "RGB": 3, "CMYK": 4}[image.mode],
            bool(image.info.get("icc_profile")),
        )
    turned = expected[2] in (5, 6, 7, 8)
    assert read_image_header(path).shown_size == ((expected[1], expected[0]) if turned else expected[:2])


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_damaged_headers_never_raise(tmp_path):
    path = tmp_path / "x.jpg"
    content = HEADERS["motorola"]
    rng = np.random.default_rng(0)
    for number in range(600):
        damaged = bytearray(content[: rng.integers(1, len(content))] if number % 3 else content)
        for _ in range(rng.integers(0, 4)):
            damaged[rng.integers(0, min(200, len(damaged)))] = rng.integers(0, 256)
        path.write_bytes(damaged)
        header = read_jpeg_header(path)
        try:
            with Image.open(path) as image:
                assert header is None or image.size == header[:2]
        except OSError:
            pass
