"""Clips with detail and motion, so that damage shows, and clips whose headers are patched."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def textured_frame(number: int, width: int = 160, height: int = 96) -> np.ndarray:
    """A moving pattern with a little noise of its own in every frame."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin((x + 3 * number) / 13), np.cos((y - 2 * number) / 9), np.sin((x + y + 5 * number) / 17)]
    noise = np.random.default_rng(number).integers(-8, 9, (height, width, 1))
    return (128 + 90 * np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8)


def make_textured_clip(
    path: Path,
    num_frames: int = 48,
    *,
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    options: dict[str, str] | None = None,
    container: str | None = None,
    frame: Callable[[int], np.ndarray] = textured_frame,
) -> Path:
    """A clip with a key frame every twelve frames."""
    height, width = frame(0).shape[:2]
    with av.open(str(path), "w", format=container) as file:
        stream = file.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        stream.codec_context.gop_size, stream.bit_rate = 12, 600_000
        stream.codec_context.options = {"sc_threshold": "0", **(options or {})}
        for number in range(num_frames):
            picture = av.VideoFrame.from_ndarray(frame(number), format="rgb24")
            picture.pts, picture.time_base = number, Fraction(1, 25)
            file.mux(stream.encode(picture))
        file.mux(stream.encode(None))
    return path


def packets_of(path: Path) -> list[tuple[int, int, int]]:
    """(position, bytes, frame number) of each packet, in the order of the file."""
    with av.open(str(path)) as file:
        packets = [packet for packet in file.demux(video=0) if packet.size]
    order = sorted(packet.pts for packet in packets)
    return [(packet.pos, packet.size, order.index(packet.pts)) for packet in packets]


def overwrite(path: Path, position: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(content)


def set_display_matrix(path: Path, a: int, b: int, c: int, d: int) -> None:
    """Patch the matrix in the track header of an MP4 file; ``1, 0, 0, 1`` is the identity."""
    content = path.read_bytes()
    header = content.index(b"tkhd")
    one = 1 << 16
    matrix = (a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30)
    overwrite(path, header + 4 + 40, struct.pack(">9i", *matrix))
