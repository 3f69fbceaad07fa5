"""Folders of 12-megapixel JPEGs, made from the example images."""

from __future__ import annotations

import io
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "src" / "latentry" / "demo"
DISTINCT = 24


def make_picture(number: int) -> bytes:
    """A 12-megapixel JPEG of one of the example images. Each number gives a slightly different one."""
    paths = sorted(path for path in (EXAMPLES / "pictures").rglob("*") if path.suffix in (".jpg", ".png"))
    image = Image.open(paths[number % len(paths)]).convert("RGB")
    shift = number // len(paths)
    image = image.crop((shift, shift, image.width - shift, image.height - shift))
    output = io.BytesIO()
    image.resize((4000, 3000), Image.Resampling.BICUBIC).save(output, "JPEG", quality=92)
    return output.getvalue()


def write_pictures(folder: Path, count: int) -> None:
    """Write ``count`` JPEGs: the first are distinct, the others are hard links to them."""
    with ProcessPoolExecutor() as pool:
        for number, content in enumerate(pool.map(make_picture, range(min(DISTINCT, count)))):
            (folder / f"{number:06d}.jpg").write_bytes(content)
    for number in range(DISTINCT, count):
        os.link(folder / f"{number % DISTINCT:06d}.jpg", folder / f"{number:06d}.jpg")
