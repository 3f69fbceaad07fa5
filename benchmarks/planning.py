"""How many headers a second planning reads, by format, compared with asking Pillow for size and orientation.

    python benchmarks/planning.py [--count 12]

Pillow decodes a PNG to look for EXIF data behind its pixels, and reads a WebP or AVIF whole.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pictures import make_picture
from PIL import Image

from latentry.media.image_header import read_image_header

FORMATS = {
    "JPEG": ("jpg", {"quality": 92}),
    "PNG": ("png", {"compress_level": 1}),
    "WEBP": ("webp", {"quality": 90, "method": 0}),
    "BMP": ("bmp", {}),
    "TIFF": ("tif", {"compression": "tiff_lzw"}),
    "GIF": ("gif", {}),
    "AVIF": ("avif", {"quality": 80, "speed": 10}),
}


def ask_pillow(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size


def rate(read: Callable[[Path], tuple[int, int]], paths: list[Path]) -> float:
    """Files per second, the best of three runs."""
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        for path in paths:
            assert read(path) == (2000, 1500)
        best = max(best, len(paths) / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=12, help="files per format")
    count = parser.parse_args().count
    pictures = [Image.open(io.BytesIO(make_picture(n))).resize((2000, 1500)) for n in range(4)]
    print(f"{'format':8} {'planning/s':>12} {'Pillow/s':>12} {'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name, (ending, options) in FORMATS.items():
            contents = []
            for picture in pictures:
                output = io.BytesIO()
                picture.save(output, name, **options)
                contents.append(output.getvalue())
            paths = [Path(folder) / f"{number}.{ending}" for number in range(count)]
            for number, path in enumerate(paths):
                path.write_bytes(contents[number % len(contents)])
            ours, pillows = rate(read_image_header, paths), rate(ask_pillow, paths)
            print(f"{name:8} {ours:12,.0f} {pillows:12,.0f} {ours / pillows:7.1f}x")


if __name__ == "__main__":
    main()
