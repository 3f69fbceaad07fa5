"""Image files made for tests, byte by byte where no encoder writes them."""

from __future__ import annotations

import binascii
import io
import struct
from fractions import Fraction

import av
import numpy as np
import pillow_heif
from PIL import Image


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def heic(image: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    pillow_heif.from_pillow(image).save(buffer, quality=95, **options)
    return buffer.getvalue()


def photo(width: int = 160, height: int = 120) -> Image.Image:
    """A picture with smooth areas, edges and colours."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    waves = 127 + 80 * np.sin(9 * x + 4 * np.sin(7 * y))
    pixels = np.stack([waves, 255 * x * y, 255 * (1 - x)], axis=-1)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (200, 30, 60)
    noise = np.random.default_rng(0).normal(0, 6, pixels.shape)
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


def exif_with(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", binascii.crc32(kind + data))


def with_png_chunk(content: bytes, kind: bytes, data: bytes, *, after_pixels: bool = False) -> bytes:
    """A PNG with one more chunk, behind its header or behind its pixels."""
    at = content.rindex(b"IEND") - 4 if after_pixels else 33
    return content[:at] + png_chunk(kind, data) + content[at:]


def deep_png(pixels: np.ndarray) -> bytes:
    """A 16-bit RGB PNG of uint16 [H,W,3], which Pillow cannot write."""
    codec = av.CodecContext.create("png", "w")
    codec.height, codec.width = pixels.shape[:2]
    codec.pix_fmt, codec.time_base = "rgb48be", Fraction(1)
    frame = av.VideoFrame.from_ndarray(pixels, format="rgb48le").reformat(format="rgb48be")
    frame.pts = 0
    return b"".join(bytes(packet) for packet in [*codec.encode(frame), *codec.encode()])


def hdr_avif(pixels: np.ndarray, transfer: int, primaries: int = 9) -> bytes:
    """A 10-bit AVIF of uint16 [H,W,3] with these numbers of ITU-T H.273."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avif") as container:
        stream = container.add_stream("libsvtav1", rate=1, options={"crf": "5"})
        stream.height, stream.width = pixels.shape[:2]
        stream.pix_fmt = "yuv420p10le"
        context = stream.codec_context
        context.color_primaries, context.color_trc, context.colorspace, context.color_range = (
            primaries,
            transfer,
            9,
            2,
        )
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb48le").reformat(
            format="yuv420p10le", src_colorspace=9, dst_colorspace=9, src_color_range=2, dst_color_range=2
        )
        frame.pts = 0
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    return buffer.getvalue()


def webp_chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 12
    while at < len(content):
        (size,) = struct.unpack_from("<I", content, at + 4)
        found.append((content[at : at + 4], content[at + 8 : at + 8 + size]))
        at += 8 + size + size % 2
    return found


def webp_of(chunks: list[tuple[bytes, bytes]]) -> bytes:
    body = b"WEBP" + b"".join(
        kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2) for kind, data in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def masked_bitmap(pixels: np.ndarray, masks: tuple[int, int, int, int], num_bits: int = 32) -> bytes:
    """A BMP with bit fields, of uint8 [H,W,4] or [H,W,3]."""
    values = np.zeros(pixels.shape[:2], np.uint32)
    for channel, mask in zip(np.moveaxis(pixels, -1, 0), masks, strict=False):
        shift = (mask & -mask).bit_length() - 1
        values |= (np.round(channel * ((mask >> shift) / 255)).astype(np.uint32) << shift) if mask else 0
    rows = values.astype(f"<u{num_bits // 8}")[::-1]
    body = b"".join(row.tobytes() + b"\0" * (-len(row.tobytes()) % 4) for row in rows)
    height, width = values.shape
    header = struct.pack("<IiiHHIIiiII", 108, width, height, 1, num_bits, 3, len(body), 0, 0, 0, 0)
    header += struct.pack("<IIII", *masks) + b"Win " + bytes(48)
    return b"BM" + struct.pack("<IHHI", 14 + len(header) + len(body), 0, 0, 14 + len(header)) + header + body


def grey_profile(gamma: float) -> bytes:
    """An ICC profile of grey with a power function."""

    def tag(kind: bytes, data: bytes) -> bytes:
        return (kind + bytes(4) + data).ljust((len(data) + 11) // 4 * 4, b"\0")

    def fixed(*values: float) -> bytes:
        return b"".join(struct.pack(">i", round(value * 65536)) for value in values)

    white = fixed(0.9642, 1.0, 0.8249)
    text = b"grey"
    description = struct.pack(">I", len(text) + 1) + text + b"\0" + bytes(8 + 3 + 67)
    tags = {
        b"desc": tag(b"desc", description),
        b"wtpt": tag(b"XYZ ", white),
        b"cprt": tag(b"text", b"none\0"),
        b"kTRC": tag(b"curv", struct.pack(">IH", 1, round(gamma * 256))),
    }
    table, data = struct.pack(">I", len(tags)), b""
    for name, content in tags.items():
        table += name + struct.pack(">II", 132 + 12 * len(tags) + len(data), len(content))
        data += content
    header = struct.pack(
        ">I4sI4s4s4s", 132 + 12 * len(tags) + len(data), b"lcms", 0x02100000, b"mntr", b"GRAY", b"XYZ "
    )
    header += struct.pack(">6H", 2020, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + white + bytes(48)
    profile = header[:128].ljust(128, b"\0") + table + data
    return struct.pack(">I", len(profile)) + profile[4:]
