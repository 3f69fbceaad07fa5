"""Folders of 12-megapixel JPEGs and of clips, made from the examples, and captions for them."""

from __future__ import annotations

import io
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "src" / "latentry" / "demo"
DISTINCT = 24
WORDS = [
    "a", "photo", "of", "the", "old", "grey", "cat", "sitting", "on", "wooden", "table", "at", "sunset", "camera",
    "panning", "slowly", "over", "waves",
]  # fmt: skip


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


def write_clips(folder: Path, count: int, num_frames: int) -> None:
    """Write one clip of 1280x720, and hard links to it."""
    import av

    with av.open(str(EXAMPLES / "clips" / "bunny.mp4")) as container:
        frames = [frame.to_image().resize((1280, 720)) for frame in container.decode(video=0)]
    path = folder / "clip.tmp.mp4"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=24, options={"crf": "20", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        for i in range(num_frames):
            output.mux(stream.encode(av.VideoFrame.from_image(frames[i % len(frames)])))
        output.mux(stream.encode())
    for i in range(count):
        os.link(path, folder / f"{i:05d}.mp4")
    path.unlink()


def write_captions(folder: Path) -> None:
    """Write a text file with a caption of its own beside each file."""
    for number, path in enumerate(sorted(folder.iterdir())):
        rng = np.random.default_rng(number)
        caption = " ".join(rng.choice(WORDS, size=rng.integers(8, 60)))
        path.with_suffix(".txt").write_text(f"{caption}, number {number}")
