"""Damaged images are told from whole ones, whatever is odd about those."""

from __future__ import annotations

import random

import numpy as np
import pillow_jxl  # noqa: F401  adds JPEG XL to Pillow, for writing
import pytest
from image_files import encoded, heic, photo, with_png_chunk
from PIL import Image

from latentry import Recipe, prepare
from latentry.errors import MediaError, RunError
from latentry.media.image_header import read_image_header
from latentry.media.images import decode_image

JPEGS = {
    "baseline": encoded(photo(), "JPEG", quality=90),
    "optimised": encoded(photo(), "JPEG", quality=90, optimize=True),
    "progressive": encoded(photo(), "JPEG", quality=90, progressive=True),
    "grey": encoded(photo().convert("L"), "JPEG", quality=90),
    "restarts": encoded(photo(), "JPEG", quality=90, restart_marker_rows=1),
    "4:4:4": encoded(photo(), "JPEG", quality=95, subsampling=0),
    "cmyk": encoded(photo().convert("CMYK"), "JPEG", quality=90),
    "profile": encoded(photo(), "JPEG", quality=90, icc_profile=b"\0" * 200),
}


def zeroed(content: bytes, start: int, end: int) -> bytes:
    return content[:start] + bytes(end - start) + content[end:]


@pytest.mark.parametrize("name", JPEGS)
def test_jpeg_without_its_second_half(name):
    content = JPEGS[name]
    half = len(content) // 2
    for damaged in (
        content[:half],
        content[:half] + b"\xff\xd9",
        zeroed(content, half, len(content)),
        zeroed(content, half, len(content) - 2),
    ):
        found = decode_image(damaged)
        assert found.damage
        assert "\n" not in found.damage
        assert found.pixels.shape == (120, 160, 3)
    assert decode_image(content[:half]).damage.startswith(
        ("Premature end", "premature end", "image file is truncated")
    )


@pytest.mark.parametrize("name", JPEGS)
def test_whole_jpegs_are_whole(name):
    content = JPEGS[name]
    whole = decode_image(content)
    assert whole.damage is None
    header_end = content.index(b"\xff\xdb")
    for odd in (
        content[:-2],  # without its end marker
        content[:-1],
        content + b"trailing garbage" * 100,
        content + bytes(5000) + content,  # a second image behind it
        content[:-2] + bytes(20) + content[-2:],  # padded before its end marker
        content[:header_end] + b"\0\0" + content[header_end:],  # garbage between two segments
    ):
        found = decode_image(odd)
        assert found.damage is None
        assert np.array_equal(found.pixels, whole.pixels)


def test_flat_areas_of_zeros_are_no_hole():
    """With optimised tables, a flat area is a long run of zeros."""
    flat = Image.new("RGB", (3000, 2000), (0, 0, 0))
    flat.paste(photo(), (0, 1000))
    content = encoded(flat, "JPEG", quality=90, optimize=True)
    assert bytes(64) in content[content.index(b"\xff\xda") :]
    assert decode_image(content).damage is None


def test_hole_of_zeros():
    content = encoded(photo(640, 480), "JPEG", quality=92)
    start = content.index(b"\xff\xda")
    for number in range(20):
        at = start + 200 + number * (len(content) - start - 3000) // 20
        assert decode_image(zeroed(content, at, at + 1024)).damage, at


def test_flipped_bits_that_the_decoder_notices():
    """Not every flipped bit can be noticed: a JPEG has no checksums. Most of those that are seen are."""
    content = encoded(photo(640, 480), "JPEG", quality=92)
    good = decode_image(content).pixels.astype(int)
    start = content.index(b"\xff\xda") + 14
    rng = random.Random(0)
    num_seen = num_found = 0
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(10):
            damaged[rng.randrange(start, len(content) - 2)] ^= 1 << rng.randrange(8)
        found = decode_image(bytes(damaged))
        seen = (np.abs(found.pixels - good).max(axis=2) > 24).mean() > 0.01
        num_seen += seen
        num_found += bool(seen and found.damage)
    assert num_seen >= 50
    assert num_found >= 0.75 * num_seen


def test_progressive_jpeg_that_ends_between_two_scans():
    content = JPEGS["progressive"]
    scans = [at for at in range(len(content)) if content.startswith(b"\xff\xda", at)]
    tables = [at for at in range(len(content)) if content.startswith(b"\xff\xc4", at)]
    for end in (
        scans[-1],
        max(at for at in tables if at < scans[-1]),
        max(at for at in tables if at < scans[2]),
    ):
        for damaged in (content[:end], content[:end] + b"\xff\xd9"):
            assert decode_image(damaged).damage == "its last scans are missing"


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF"])
def test_cut_images_keep_what_was_decoded(kind):
    content = encoded(photo(), kind)
    whole = decode_image(content)
    assert whole.damage is None
    found = decode_image(content[: len(content) * 2 // 3])
    assert "truncated" in found.damage
    first, last = (-10, 0) if kind == "BMP" else (10, -1)  # a BMP begins at the bottom
    assert np.array_equal(found.pixels[first], whole.pixels[first])
    assert not np.array_equal(found.pixels[last], whole.pixels[last])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JXL", {}),
        ("HEIC", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("AVIF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
def test_formats_that_decode_whole_or_not_at_all(kind, options):
    content = heic(photo()) if kind == "HEIC" else encoded(photo(), kind, **options)
    with pytest.raises(MediaError, match=r"^cannot be decoded: "):
        decode_image(content[: len(content) * 2 // 3])


def test_png_with_a_wrong_checksum():
    content = bytearray(encoded(photo()))
    at = content.index(b"IDAT")
    content[at + 3000] ^= 4
    assert decode_image(bytes(content)).damage == "the checksum of a chunk IDAT is wrong"


def test_png_without_its_end_chunk_is_whole():
    content = encoded(photo())
    assert decode_image(content[:-12]).damage is None
    assert decode_image(content[:-6] + b"garbage").damage is None


def test_jpeg_data_in_a_tiff():
    whole = encoded(photo(640, 480), "TIFF", compression="jpeg", quality=90)
    assert decode_image(whole).damage is None
    middle = len(whole) // 2
    assert decode_image(zeroed(whole, middle, middle + 2000)).damage == "premature end of data segment"


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JXL", "HEIC"])
def test_random_damage_never_raises_anything_else(tmp_path, monkeypatch, kind):
    """In headers and in pixels, of every format: pixels, damage or a reason in one line."""
    content = heic(photo(64, 48)) if kind == "HEIC" else encoded(photo(64, 48), kind)
    monkeypatch.setattr("latentry.media.pillow.MAX_PIXELS", 1 << 20)
    rng = random.Random(kind)
    path = tmp_path / "image"
    reasons = []
    for number in range(150):
        damaged = bytearray(content[: rng.randrange(1, len(content))] if number % 3 == 0 else content)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(min(len(damaged), 80 if number % 2 else 1 << 20))] = rng.randrange(256)
        path.write_bytes(damaged)
        for read, argument in ((read_image_header, path), (decode_image, bytes(damaged))):
            try:
                read(argument)
            except MediaError as error:
                reasons.append(str(error))
    assert len(reasons) > 20
    assert not [reason for reason in reasons if "\n" in reason]


@pytest.mark.parametrize("damaged", ["skip", "keep", "error"])
def test_what_a_run_does_with_damaged_images(tmp_path, damaged):
    folder = tmp_path / "photos"
    folder.mkdir()
    content = JPEGS["baseline"]
    (folder / "cut.jpg").write_bytes(content[: len(content) // 2])
    (folder / "whole.jpg").write_bytes(content[:-2])
    arguments = {"image_dir": folder, "output_dir": tmp_path / "cache", "damaged": damaged}
    if damaged == "error":
        with pytest.raises(RunError, match=r"^cut\.jpg is damaged: Premature end of JPEG file; committed"):
            prepare(Recipe(max_pixels=64 * 64), **arguments)
        return
    result = prepare(Recipe(max_pixels=64 * 64), **arguments)
    failures = [(failure.name, failure.reason) for failure in result.failures]
    assert failures == ([("cut.jpg", "is damaged: Premature end of JPEG file")] if damaged == "skip" else [])
    assert dict(result.notes) == ({"damaged, and kept": 1} if damaged == "keep" else {})


def test_what_the_options_leave_out_is_not_damaged(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "plain.png").write_bytes(encoded(photo()))
    (folder / "hdr.png").write_bytes(with_png_chunk(encoded(photo()), b"cICP", bytes([9, 16, 0, 1])))
    recipe = Recipe(max_pixels=64 * 64, hdr="skip")
    result = prepare(recipe, image_dir=folder, output_dir=tmp_path / "cache", damaged="error")
    assert (result.num_encoded, [failure.name for failure in result.failures]) == (1, ["hdr.png"])
    result = prepare(Recipe(max_pixels=64 * 64), image_dir=folder, output_dir=tmp_path / "all", dry_run=True)
    assert dict(result.notes) == {"HDR (PQ), tone-mapped to sRGB": 1}
