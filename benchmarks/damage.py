"""How much damage to JPEGs is noticed, by type of damage.

    python benchmarks/damage.py [--photos DIR] [--count 100]

Each photo is encoded again as a baseline and as a progressive JPEG, damaged three times at random positions in its
compressed data, and decoded. Damage is visible if more than 0.2% of the pixels change by more than 24 grey levels.
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
from pictures import EXAMPLES
from PIL import Image

from latentry.errors import MediaError
from latentry.media.formats.jpeg_header import parse_jpeg_header
from latentry.media.images import decode_image

TRIALS = 3


def cut(content: bytes, at: int, rng: random.Random) -> bytes:
    return content[:at]


def cut_with_end_marker(content: bytes, at: int, rng: random.Random) -> bytes:
    return content[:at] + b"\xff\xd9"


def zeros_to_the_end(content: bytes, at: int, rng: random.Random) -> bytes:
    return content[:at] + bytes(len(content) - at)


def hole_of_4_kb(content: bytes, at: int, rng: random.Random) -> bytes:
    end = min(at + 4096, len(content) - 2)
    return content[:at] + bytes(end - at) + content[end:]


def random_64_bytes(content: bytes, at: int, rng: random.Random) -> bytes:
    return content[:at] + rng.randbytes(64) + content[at + 64 :]


def flip(content: bytes, at: int, rng: random.Random, count: int = 1) -> bytes:
    damaged = bytearray(content)
    for number in range(count):
        damaged[at if number == 0 else rng.randrange(at, len(content) - 2)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


DAMAGE: dict[str, Callable[[bytes, int, random.Random], bytes]] = {
    "cut": cut,
    "cut, end marker added": cut_with_end_marker,
    "zeros to the end": zeros_to_the_end,
    "hole of 4 kB of zeros": hole_of_4_kb,
    "64 random bytes": random_64_bytes,
    "10 flipped bits": lambda content, at, rng: flip(content, at, rng, 10),
    "1 flipped bit": flip,
}


def measure(contents: list[bytes], name: str) -> tuple[int, int, int, int]:
    """(damaged files, noticed, visibly damaged, noticed of these)."""
    total = noticed = visible = visible_noticed = 0
    for number, content in enumerate(contents):
        header = parse_jpeg_header(content)
        good = decode_image(content)
        assert header is not None
        assert good.damage is None
        for trial in range(TRIALS):
            rng = random.Random(f"{name} {number} {trial}")
            damaged = DAMAGE[name](content, rng.randrange(header.scan_offset + 14, len(content) - 2), rng)
            try:
                image = decode_image(damaged)
                found = image.damage is not None
                changed = np.abs(image.pixels.astype(np.int16) - good.pixels).max(axis=2) > 24
                seen = bool(changed.mean() > 0.002)
            except MediaError:
                found = seen = True
            total, noticed = total + 1, noticed + found
            visible, visible_noticed = visible + seen, visible_noticed + (seen and found)
    return total, noticed, visible, visible_noticed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--photos", type=Path, default=EXAMPLES / "pictures", help="folder of photos")
    parser.add_argument("--count", type=int, default=100, help="photos to take")
    options = parser.parse_args()
    endings = (".jpg", ".jpeg", ".png")
    paths = sorted(
        path for path in options.photos.rglob("*") if path.suffix.lower() in endings and path.is_file()
    )
    random.Random(1).shuffle(paths)
    photos = []
    for path in paths:
        with Image.open(path) as image:
            if (
                image.mode == "RGB"
                and 50_000 < image.width * image.height < 2_000_000
                and len(photos) < options.count
            ):
                photos.append(image.convert("RGB"))
    print(f"{len(photos)} photos, {TRIALS} damaged files of each")
    for progressive in (False, True):
        contents = []
        for photo in photos:
            output = io.BytesIO()
            photo.save(output, "JPEG", quality=88, progressive=progressive)
            contents.append(output.getvalue())
        print("progressive" if progressive else "baseline")
        for name in DAMAGE:
            total, noticed, visible, visible_noticed = measure(contents, name)
            share = 100 * visible_noticed / max(1, visible)
            print(
                f"  {name:24} noticed {noticed}/{total}, of the visible {visible_noticed}/{visible} ({share:.0f}%)"
            )


if __name__ == "__main__":
    main()
