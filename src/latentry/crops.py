"""Crops: how far an image is scaled, and which window of it is kept.

The image is scaled until it just covers the target size, then a window of exactly that size is cut from it: the
centre, a random one, or the one with the most detail.
"""

from __future__ import annotations

import operator
import random
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latentry.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image

CROP_MODES = ("center", "random", "smart")

Seed: TypeAlias = "int | random.Random | np.random.Generator | None"
"""What decides a random crop: a number, or a generator to draw from. None draws from the system's entropy."""


def choose_window(
    image: Image.Image | npt.NDArray[Any], target: tuple[int, int], crop_mode: str, seed: Seed = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The (width, height) to scale an image to, and the (left, top) offset of the window to cut from it.

    Args:
        image: A PIL image, or an array [H,W,...].
        target: (width, height) of the window.
        crop_mode: One of ``CROP_MODES``.
        seed: What decides a random crop.
    """
    require_positive("target", *target)
    if crop_mode not in CROP_MODES:
        raise ConfigError(f"unknown crop_mode {crop_mode!r}; choose one of {', '.join(CROP_MODES)}")
    size = (image.shape[1], image.shape[0]) if isinstance(image, np.ndarray) else image.size
    require_positive("image", *size)
    scaled = covering_size(size, target)
    spare_x, spare_y = scaled[0] - target[0], scaled[1] - target[1]
    if crop_mode == "center" or spare_x == spare_y == 0:
        return scaled, (spare_x // 2, spare_y // 2)
    if crop_mode == "random":
        return scaled, _draw_offsets(spare_x, spare_y, seed)
    pil_image = image_from_array(image) if isinstance(image, np.ndarray) else image
    return scaled, _most_detailed_offsets(pil_image, scaled, target)


def covering_size(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """The smallest (width, height) with the aspect ratio of ``size`` that covers ``target``, in whole pixels.

    >>> covering_size((4000, 3000), (576, 448))
    (597, 448)

    One side equals the target's. The other is rounded to the nearest integer, but is never below the target's.
    """
    (width, height), (target_width, target_height) = size, target
    if target_width * height >= target_height * width:
        return target_width, max(target_height, (2 * height * target_width + width) // (2 * width))
    return max(target_width, (2 * width * target_height + height) // (2 * height)), target_height


def require_positive(what: str, width: int, height: int) -> None:
    """Raise a ``ConfigError`` that names ``what`` unless both sides are positive."""
    if not (width > 0 and height > 0):
        raise ConfigError(f"{what} size is {width}x{height}; both sides must be positive")


def image_from_array(array: npt.NDArray[Any]) -> Image.Image:
    """A PIL image of a uint8 array [H,W], [H,W,3] or [H,W,4]; a ``ConfigError`` for anything else."""
    from PIL import Image

    if not (
        isinstance(array, np.ndarray)
        and array.dtype == np.uint8
        and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4)))
    ):
        found = (
            f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else repr(type(array))
        )
        raise ConfigError(f"an image is a PIL image or a uint8 array [H,W], [H,W,3] or [H,W,4]; got {found}")
    if 0 in array.shape:
        require_positive("image", array.shape[1], array.shape[0])
    return Image.fromarray(array)


def _draw_offsets(spare_x: int, spare_y: int, seed: Seed) -> tuple[int, int]:
    if isinstance(seed, np.random.Generator):
        return int(seed.integers(0, spare_x, endpoint=True)), int(seed.integers(0, spare_y, endpoint=True))
    try:
        generator = seed if isinstance(seed, random.Random) else random.Random(seed and operator.index(seed))
    except TypeError:
        raise ConfigError(
            f"seed is a {type(seed).__name__}; give an integer, a random.Random or a numpy Generator"
        ) from None
    return generator.randint(0, spare_x), generator.randint(0, spare_y)


def _most_detailed_offsets(
    image: Image.Image, scaled: tuple[int, int], target: tuple[int, int]
) -> tuple[int, int]:
    """The offset of the window with the most gradient energy; the centre if all windows have the same.

    Gradients are measured on a small grey copy, in which noise and film grain are averaged out.
    """
    from PIL import Image

    shrink = min(1.0, 256 / max(scaled))
    small_size = (max(1, round(scaled[0] * shrink)), max(1, round(scaled[1] * shrink)))
    small = np.asarray(image.convert("L").resize(small_size, Image.Resampling.BOX), dtype=np.float64)
    detail = np.zeros_like(small)
    detail[:, 1:] += np.diff(small, axis=1) ** 2
    detail[1:, :] += np.diff(small, axis=0) ** 2
    return (
        _best_window(detail.sum(axis=0), scaled[0], target[0]),
        _best_window(detail.sum(axis=1), scaled[1], target[1]),
    )


def _best_window(profile: npt.NDArray[np.float64], length: int, window: int) -> int:
    """The offset in ``range(length - window + 1)`` whose window covers most of ``profile``."""
    spare = length - window
    if spare == 0:
        return 0
    offsets = np.arange(spare + 1) if spare < 4096 else np.linspace(0, spare, 4097).astype(np.int64)
    cumulative = np.concatenate([[0.0], np.cumsum(profile)])
    knots = np.linspace(0, length, len(cumulative))
    covered = np.interp(offsets + window, knots, cumulative) - np.interp(offsets, knots, cumulative)
    best = offsets[covered >= covered.max() - 1e-9 * max(1.0, cumulative[-1])]
    return int(best[np.argmin(np.abs(best - spare // 2))])
