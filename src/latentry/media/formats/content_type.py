"""What a file is, by its first bytes. Endings are not trusted: a file is what its content says."""

from __future__ import annotations

from latentry.media.formats.jxl_header import CODESTREAM_START, CONTAINER_START
from latentry.media.formats.png import SIGNATURE
from latentry.media.formats.webp import is_webp

PREFIX_BYTES = 64
_HEIC_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"})
_AVIF_BRANDS = frozenset({b"avif", b"avis"})
_IMAGE_CONTAINERS = frozenset({b"mif1", b"msf1", b"mif2"})
_IMAGES = {
    b"\xff\xd8\xff": "JPEG",
    SIGNATURE: "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    CODESTREAM_START: "JPEG XL",
    CONTAINER_START: "JPEG XL",
}
_VIDEOS = {
    b"\x1aE\xdf\xa3": "Matroska or WebM",
    b"OggS": "Ogg",
    b"FLV": "Flash",
    b"\0\0\1\xba": "MPEG",
    b"\0\0\1\xb3": "MPEG",
    b"0&\xb2u\x8ef\xcf\x11": "Windows Media",
}
_OTHERS = {
    b"%PDF": "a PDF document",
    b"PK\3\4": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"%!PS": "a PostScript document",
    b"<svg": "an SVG drawing",
    b"<!doctype html": "an HTML page",
    b"<html": "an HTML page",
    b"<?xml": "an XML document",
}


def image_type_of(prefix: bytes) -> str | None:
    """The name of an image format, such as ``PNG``; None if the file is not an image that we know.

    Args:
        prefix: The first ``PREFIX_BYTES`` bytes of the file.
    """
    if is_webp(prefix):
        return "WebP"
    if prefix[4:8] == b"ftyp":
        brands = _brands(prefix)
        if brands[0] in _AVIF_BRANDS or (brands[0] in _IMAGE_CONTAINERS and _AVIF_BRANDS & set(brands)):
            return "AVIF"
        if brands[0] in _HEIC_BRANDS or (brands[0] in _IMAGE_CONTAINERS and _HEIC_BRANDS & set(brands)):
            return "HEIC"
        return None
    return next((name for start, name in _IMAGES.items() if prefix.startswith(start)), None)


def other_type(prefix: bytes) -> str | None:
    """What a file that is not an image is, such as ``a video (MP4)``; None if unknown.

    Args:
        prefix: The first ``PREFIX_BYTES`` bytes of the file.
    """
    if prefix[4:8] in (b"ftyp", b"moov", b"mdat") or prefix[4:12] == b"wideftyp":
        return "a video (MP4 or QuickTime)"
    if prefix[:4] == b"RIFF" and prefix[8:12] == b"AVI ":
        return "a video (AVI)"
    for start, name in _VIDEOS.items():
        if prefix.startswith(start):
            return f"a video ({name})"
    text = prefix.lstrip(b"\xef\xbb\xbf \t\r\n")
    lowered = text.lower()
    return next(
        (name for start, name in _OTHERS.items() if text.startswith(start) or lowered.startswith(start)), None
    )


def _brands(prefix: bytes) -> list[bytes]:
    """The major brand of an ISO file, then the compatible ones."""
    end = min(int.from_bytes(prefix[:4], "big"), len(prefix))
    return [prefix[8:12], *(prefix[at : at + 4] for at in range(16, end - 3, 4))]
