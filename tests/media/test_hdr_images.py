"""HDR pictures become sRGB by the rule of ``latentry.media.hdr``, or are skipped with a reason."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pillow_heif
import pytest
from helpers import run_main
from image_files import deep_png, encoded, hdr_avif, with_png_chunk
from PIL import Image

from latentry.errors import MediaError
from latentry.media.hdr import tone_map
from latentry.media.image_header import read_image_header
from latentry.media.images import decode_image

PQ, HLG, SRGB = 16, 18, 13
JXL = base64.b64decode(
    "AAAADEpYTCANCocKAAAAFGZ0eXBqeGwgAAAAAGp4bCAAAAAJanhsbAoAAAELanhsY/8K1wT8AOTRIw4HAAAAgAgCAQC4A0soMd2M"
    "vYuH5WGVUFA4CjMFBUc0gqAQMQLx8RcjEBkDSNc1xuDtYrC4eDWAcyRj8MCNAAACMRAAQgUAwAHBNHBZXuELU3+pAdEZUEENAQUA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAADw/8///////////////z+R/mv/jFB1zIMVjVCg/MTZk5zhMKMhbRVW"
    "IGbjJA8nMAA="
)
"""A lossless JPEG XL in PQ and BT.2020: red rises from 0 by 512 a pixel, green is 30000, blue 0 or 50000 of 65535."""


def ramp() -> np.ndarray:
    """uint16 [96,128,3]: smooth code values up to three quarters, about 1000 nits in PQ."""
    x, y = np.meshgrid(np.linspace(0.1, 0.75, 128), np.linspace(0.2, 0.6, 96))
    return (np.stack([x, (x + y) / 2, y], axis=-1) * 65535).astype(np.uint16)


def png(transfer: int, primaries: int = 9, *, deep: bool = True) -> bytes:
    content = deep_png(ramp()) if deep else encoded(Image.fromarray((ramp() >> 8).astype(np.uint8)))
    return with_png_chunk(content, b"cICP", bytes([primaries, transfer, 0, 1]))


def heic(transfer: int, primaries: int = 9) -> bytes:
    buffer = io.BytesIO()
    image = pillow_heif.from_bytes("RGB;16", (128, 96), ramp().tobytes())
    image.save(
        buffer, quality=95, chroma=444, color_primaries=primaries, transfer_characteristics=transfer,
        matrix_coefficients=9, full_range_flag=1,
    )  # fmt: skip
    return buffer.getvalue()


FILES = {
    "PNG, 16 bits": (png, 1.0),
    "PNG, 8 bits": (lambda *numbers: png(*numbers, deep=False), 2.5),
    "AVIF, 10 bits": (lambda *numbers: hdr_avif(ramp(), *numbers), 4.0),
    "HEIC, 10 bits": (heic, 4.0),
}
"""Name to (a function that writes the file, by how many grey levels it may differ in the mean)."""


@pytest.mark.parametrize(("transfer", "name"), [(PQ, "pq"), (HLG, "hlg")])
@pytest.mark.parametrize(("primaries", "gamut"), [(9, "bt2020"), (12, "p3"), (1, "bt709")])
@pytest.mark.parametrize("kind", FILES)
def test_hdr_is_tone_mapped(kind, transfer, name, primaries, gamut):
    write, tolerance = FILES[kind]
    image = decode_image(write(transfer, primaries))
    expected = tone_map(ramp() / 65535, name, gamut).astype(int)
    assert image.damage is None
    assert np.abs(image.pixels - expected).mean() < tolerance
    raw = (ramp() >> 8).astype(int)
    assert np.abs(image.pixels - raw).mean() > 5, "the code values themselves are no picture"


def test_deep_png_is_exact():
    expected = tone_map(ramp() / 65535, "pq", "bt2020").astype(int)
    assert np.abs(decode_image(png(PQ)).pixels - expected).max() <= 1


def test_hdr_jpeg_xl():
    values = np.zeros((96, 128, 3), np.uint16)
    values[..., 0], values[..., 1] = np.arange(128) * 512, 30000
    values[48:, :, 2] = 50000
    expected = tone_map((values >> 8) / 255, "pq", "bt2020").astype(int)
    assert np.abs(decode_image(JXL).pixels - expected).max() <= 12, (
        "the decoder gives 8 bits, which differ by one"
    )
    assert np.abs(decode_image(JXL).pixels - expected).mean() < 2


@pytest.mark.parametrize("kind", ["PNG, 16 bits", "AVIF, 10 bits", "HEIC, 10 bits"])
def test_sdr_with_the_same_numbers_is_no_hdr(tmp_path, kind):
    path = tmp_path / "image"
    path.write_bytes(FILES[kind][0](SRGB, 1))
    assert read_image_header(path, hdr="skip").shown_size == (128, 96)
    pixels = decode_image(path.read_bytes(), hdr="skip").pixels
    if kind.startswith("PNG"):
        assert np.array_equal(pixels, (ramp() >> 8).astype(np.uint8))


@pytest.mark.parametrize("kind", [*FILES, "JPEG XL"])
def test_hdr_is_skipped_if_asked(tmp_path, kind):
    content = JXL if kind == "JPEG XL" else FILES[kind][0](PQ)
    path = tmp_path / "image"
    path.write_bytes(content)
    assert read_image_header(path).shown_size == (128, 96)
    for refuse in (
        lambda: read_image_header(path, hdr="skip").shown_size,
        lambda: decode_image(content, hdr="skip"),
    ):
        with pytest.raises(MediaError, match=r"^is HDR \(PQ\); leave out --hdr skip to convert it to sRGB$"):
            refuse()


def test_transparent_hdr_is_on_white():
    clear = np.zeros((8, 8, 4), np.uint8)
    clear[:4] = (100, 100, 100, 255)
    content = with_png_chunk(encoded(Image.fromarray(clear)), b"cICP", bytes([9, PQ, 0, 1]))
    pixels = decode_image(content).pixels
    assert pixels[7, 0].tolist() == [255, 255, 255]
    assert pixels[0, 0].tolist() == tone_map(np.full(3, 100 / 255), "pq").tolist()


def test_flag(tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "hdr.png").write_bytes(png(HLG))
    (folder / "sdr.png").write_bytes(encoded(Image.new("RGB", (128, 96), "teal")))
    command = ["image", "--image_dir", folder, "--max_pixels", 64 * 64, "--json", "--output_dir"]
    status, out, _ = run_main(capsys, *command, tmp_path / "all")
    assert (status, json.loads(out)["encoded"]) == (0, 2)
    status, out, _ = run_main(capsys, *command, tmp_path / "skipped", "--hdr", "skip")
    assert status == 2
    reason = "is HDR (HLG); leave out --hdr skip to convert it to sRGB"
    assert json.loads(out)["failures"] == [{"name": "hdr.png", "reason": reason}]
    status, _, err = run_main(capsys, *command, tmp_path / "all", "--hdr", "skip")
    assert status == 1
    assert "hdr was 'tonemap', now 'skip'" in err
