"""JPEG: pixels from libjpeg-turbo, and whether its compressed data is damaged.

libjpeg-turbo decodes what it can and counts warnings. A warning about the compressed data means that pixels are wrong:
data that ends early, a code that does not exist, data that is left over at the end. Warnings about what does not
change pixels are no damage: a missing end marker, padding before it, or garbage among the metadata. To tell the two
apart, data that caused a warning is decoded again without these. Two types of damage cause no warning and are looked
for here: a hole of zeros, and a progressive JPEG that ends between two scans.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import simplejpeg

from latentry.media.formats.jpeg_header import JpegHeader

END_MARKER = b"\xff\xd9"
_SCAN, _TABLES, _RESTART_INTERVAL, _HUFFMAN_TABLES, _ADOBE = 0xDA, 0xDB, 0xDD, 0xC4, 0xEE
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_DECODING_MARKERS = _FRAMES | {_TABLES, _RESTART_INTERVAL, _HUFFMAN_TABLES, 0xCC, _ADOBE}
_MARKER = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])")
"""A marker, between or inside compressed data: neither a stuffed zero nor a restart."""
_PROFILE = b"ICC_PROFILE\x00"
_HOLE = bytes(64)


def decode_strictly(content: bytes, colorspace: str) -> npt.NDArray[np.uint8] | None:
    """Pixels [H,W,C] of a JPEG that causes no warning; None if it does, or if libjpeg-turbo cannot decode it."""
    return _decode(content, colorspace, strict=True)


def decode_leniently(content: bytes, colorspace: str) -> npt.NDArray[np.uint8] | None:
    """Pixels [H,W,C] of a JPEG, as far as they can be decoded; None if libjpeg-turbo cannot decode it."""
    return _decode(content, colorspace, strict=False)


def _decode(content: bytes, colorspace: str, *, strict: bool) -> npt.NDArray[np.uint8] | None:
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(content, colorspace=colorspace, strict=strict)
    except Exception:  # Pillow accepts some of these files; if it does not, it gives the reason
        return None
    return pixels


def jpeg_damage(content: bytes, otherwise: str | None = None) -> str | None:
    """What is wrong with the compressed data of a JPEG that causes warnings; None if nothing that matters to pixels.

    Args:
        content: The file.
        otherwise: What to return if libjpeg-turbo cannot decode this type of JPEG.
    """
    clean, num_components = _without_metadata(content)
    colorspace = "CMYK" if num_components == 4 else "GRAY"
    if decode_leniently(clean, colorspace) is None:
        return otherwise
    warning = _warning(clean, colorspace)
    if warning is None:
        return None
    end = clean.rfind(END_MARKER)
    body = clean if end < 0 else clean[:end]
    for whole in (body, body.rstrip(b"\0")):  # without its end marker, or with padding before it
        if _warning(whole + END_MARKER, colorspace) is None:
            return None
    return warning


def hidden_damage(content: bytes, header: JpegHeader) -> str | None:
    """Damage that causes no warning: a hole of zeros in the compressed data, or scans that are missing.

    Args:
        content: The file.
        header: What ``parse_jpeg_header`` returned for it.
    """
    if header.is_progressive:
        return _missing_scans(content)
    hole = content.find(_HOLE, header.scan_offset)
    if 0 <= hole < content.find(END_MARKER, header.scan_offset) and not _zeros_are_plausible(content):
        return "its compressed data has a hole of zeros"
    return None


def read_profile(content: bytes) -> bytes | None:
    """The ICC profile of a JPEG, put together from its parts; None if there is none or parts are missing."""
    parts = sorted(
        segment[len(_PROFILE) :]
        for marker, segment in _segments(content)
        if marker == 0xE2 and segment.startswith(_PROFILE)
    )
    if not parts or len(parts[0]) < 2 or parts[0][1] != len(parts):
        return None
    return b"".join(part[2:] for part in parts)


def _warning(content: bytes, colorspace: str) -> str | None:
    """The first warning about a JPEG that can be decoded; None if there is none."""
    try:
        simplejpeg.decode_jpeg(content, colorspace=colorspace)
    except Exception as error:
        return str(error).removeprefix("Corrupt JPEG data: ")
    return None


def _segments(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Marker and content of each segment, wherever it is; compressed data and garbage are passed over."""
    position = 2
    while (found := _MARKER.search(content, position)) is not None:
        marker, start = found[1][0], found.end()
        position = start
        if marker == 0xD9:
            return
        if marker in (0x01, 0xD8) or start + 2 > len(content):
            continue
        (length,) = struct.unpack_from(">H", content, start)
        if length >= 2:
            position = start + length
            yield marker, content[start + 2 : position]


def _without_metadata(content: bytes) -> tuple[bytes, int]:
    """The file with those segments that decoding needs, and the number of its components."""
    parts, num_components = [b"\xff\xd8"], 3
    position = 2
    while (found := _MARKER.search(content, position)) is not None:
        marker, start = found[1][0], found.end()
        position = start
        if marker == _SCAN:
            return b"".join([*parts, b"\xff", content[start - 1 :]]), num_components
        if marker in (0x01, 0xD8) or start + 2 > len(content):
            continue
        (length,) = struct.unpack_from(">H", content, start)
        if marker in _DECODING_MARKERS:
            parts.append(b"\xff" + content[start - 1 : start + length])
            if marker in _FRAMES and length >= 8:
                num_components = content[start + 7]
        position = start + max(0, length)
    return content, num_components


def _zeros_are_plausible(content: bytes) -> bool:
    """Whether a run of zeros can be a flat area: if a zero bit ends a block in each table, or only one is in use."""
    num_components, ends_block = 0, True
    for marker, segment in _segments(content):
        if marker in _FRAMES and len(segment) > 5:
            num_components = segment[5]
        elif marker == _SCAN:
            return ends_block or segment[:1] != bytes([num_components])
        elif marker == _HUFFMAN_TABLES:
            offset = 0
            while offset + 17 < len(segment):
                is_ac, first_symbol = segment[offset] >> 4, segment[offset + 17]
                ends_block = ends_block and (not is_ac or first_symbol == 0)
                offset += 17 + sum(segment[offset + 1 : offset + 17])
    return True


def _missing_scans(content: bytes) -> str | None:
    """Whether a progressive JPEG lacks scans: each component needs every coefficient down to its last bit."""
    missing: dict[int, set[int]] = {}
    for marker, segment in _segments(content):
        if marker in _FRAMES and len(segment) > 5:
            missing = {component: set(range(64)) for component in segment[6::3]}
        elif marker == _SCAN and len(segment) >= 4 and segment[-1] & 15 == 0:
            done = range(segment[-3], segment[-2] + 1)
            for component in segment[1 : 1 + 2 * segment[0] : 2]:
                missing.get(component, set()).difference_update(done)
    return "its last scans are missing" if any(missing.values()) else None
