"""Images as samples: each file is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from latentry.errors import MediaError
from latentry.media.content import MediaFile, read_media_file
from latentry.media.image_header import read_image_header
from latentry.media.images import decode_image, fit_to_bucket
from latentry.media.reader import Crop, ProbeResult
from latentry.types import PlannedSample

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
    | {".avif", ".heic", ".heif", ".jxl"}
)


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads images. Each is one sample."""

    crop_mode: str
    resize_mode: str = "bicubic"
    hdr: str = "tonemap"
    suffixes: frozenset[str] = IMAGE_SUFFIXES

    def probe(self, path: Path) -> ProbeResult:
        header = read_image_header(path, self.hdr)
        notes = (f"HDR ({header.hdr.transfer.upper()}), tone-mapped to sRGB",) if header.hdr else ()
        return ProbeResult(*header.shown_size, notes=notes)

    def load(self, path: Path) -> MediaFile:
        return read_media_file(path)

    def read(self, file: MediaFile, samples: Sequence[PlannedSample], seed: int) -> list[Crop]:
        (sample,) = samples
        assert file.content is not None, "images are read whole, whatever their size"
        image = decode_image(file.content, self.hdr)
        height, width = image.pixels.shape[:2]
        if (width, height) != (sample.width, sample.height):
            raise MediaError(f"is {width}x{height}, but was {sample.width}x{sample.height} when planned")
        window, offset = fit_to_bucket(
            image.pixels, sample.bucket.resolution, self.crop_mode, seed, self.resize_mode
        )
        return [Crop(window, offset, damage=image.damage)]
