"""Which shape a picture is cut to: resolution buckets under a pixel budget.

A bucket list is a pure function of (quantization, max_pixels): for each standard aspect ratio,
the largest resolution on the quantization grid that the budget allows, without repeats. A picture
goes to the bucket whose aspect ratio is nearest to its own. Nearest-of-n is a question about
intervals, so the borders between neighbouring buckets are computed once, exactly, and a million
pictures are answered with a handful of vectorised comparisons (about 15 ns each) instead of n
subtractions per picture. No torch here: planning runs on machines that have none to spare.
"""

from __future__ import annotations

import logging
import math
import operator
import random
from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latentry.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

Seed: TypeAlias = "int | random.Random | np.random.Generator | None"
"""What fixes a random crop: a number, or a generator that is drawn from."""

DEFAULT_MAX_PIXELS = 256 * 256
CROP_MODES = ("center", "random", "smart")
_ASSIGN_CHUNK = 1 << 16
"""Images per vectorised step: small enough that every intermediate stays in the L2 cache."""


def aspect_name(aspect_ratio: float) -> str:
    """``tall``, ``square`` or ``wide``: part of a bucket's key in the documented interface."""
    if aspect_ratio < 0.85:
        return "tall"
    return "wide" if aspect_ratio > 1.18 else "square"


class MultiTierBucketCalculator:
    """Resolution buckets within a pixel budget, and the best one for a picture.

    >>> calculator = MultiTierBucketCalculator.from_preset("512p")
    >>> calculator.get_bucket_for_image(4000, 3000)["resolution"]
    (576, 448)

    A bucket is a dictionary of ``id``, ``resolution`` (width, height), ``aspect_ratio`` and
    ``pixels``. Buckets stand in order of aspect ratio, tallest first; ``id`` is the position.
    """

    ASPECT_RATIOS: tuple[tuple[int, int], ...] = (
        (1, 2),
        (9, 16),
        (2, 3),
        (3, 4),
        (4, 5),
        (1, 1),
        (5, 4),
        (4, 3),
        (3, 2),
        (16, 10),
        (5, 3),
        (16, 9),
        (2, 1),
        (21, 9),
    )
    """The shapes that pictures and films come in, as (width, height)."""

    RESOLUTION_PRESETS: dict[str, int] = {  # noqa: RUF012 - subclasses replace it
        f"{side}p": side * side for side in (256, 512, 768, 1024, 1536)
    }
    """Preset name to pixel budget: the pixels of a square with that side."""

    def __init__(
        self, quantization: int = 64, max_pixels: int | None = None, debug_mode: bool = False
    ) -> None:
        if quantization < 1:
            raise ConfigError(f"quantization is {quantization}; it must be at least 1 (64 suits FLUX)")
        if max_pixels is None:
            max_pixels = DEFAULT_MAX_PIXELS
        if max_pixels < quantization**2:
            raise ConfigError(
                f"max_pixels is {max_pixels}, less than one {quantization}x{quantization} quantum; "
                f"allow at least {quantization**2}"
            )
        self.quantization = quantization
        self.max_pixels = max_pixels
        self.buckets = self._generate_all_buckets()
        self._build_lookup_structures()
        if debug_mode:
            self._print_bucket_summary()

    @classmethod
    def from_preset(cls, preset: str, quantization: int = 64) -> MultiTierBucketCalculator:
        """Buckets for a named budget: ``from_preset("1024p")``."""
        if preset not in cls.RESOLUTION_PRESETS:
            raise ConfigError(
                f"unknown resolution preset {preset!r}; choose one of {', '.join(cls.RESOLUTION_PRESETS)}"
            )
        return cls(quantization=quantization, max_pixels=cls.RESOLUTION_PRESETS[preset])

    # ---- the bucket list --------------------------------------------------------------------

    def _generate_all_buckets(self) -> list[dict[str, Any]]:
        """One bucket per distinct resolution that a standard aspect ratio leads to."""
        candidates = (self._calculate_max_resolution(w / h) for w, h in self.ASPECT_RATIOS)
        resolutions = sorted({r for r in candidates if r is not None}, key=lambda r: r[0] / r[1])
        if not resolutions:
            raise ConfigError(
                f"none of the aspect ratios {self.ASPECT_RATIOS} fits {self.max_pixels} pixels on a grid of "
                f"{self.quantization}; raise max_pixels or add a squarer ratio"
            )
        return [
            {"id": i, "resolution": (w, h), "aspect_ratio": w / h, "pixels": w * h}
            for i, (w, h) in enumerate(resolutions)
        ]

    def _calculate_max_resolution(self, aspect_ratio: float) -> tuple[int, int] | None:
        """The largest (width, height) of this shape within the budget; None if not one quantum fits."""
        height = self._round_to_quantization(int(math.sqrt(self.max_pixels / aspect_ratio)))
        width = self._round_to_quantization(int(height * aspect_ratio))
        while width * height > self.max_pixels:  # rounding up may have overshot
            if width >= height:
                width -= self.quantization
            else:
                height -= self.quantization
        return (width, height) if min(width, height) >= self.quantization else None

    def _round_to_quantization(self, value: int) -> int:
        """The nearest multiple of the quantum; halves go to the even multiple, as Python rounds."""
        return round(value / self.quantization) * self.quantization

    def _build_lookup_structures(self) -> None:
        """Index the buckets by resolution, and find where along the aspect-ratio axis each begins."""
        self.buckets_by_resolution = {b["resolution"]: b for b in self.buckets}
        self._buckets_by_id = {b["id"]: b for b in self.buckets}
        first_with_aspect: dict[float, int] = {}
        for position, bucket in enumerate(self.buckets):
            first_with_aspect.setdefault(bucket["aspect_ratio"], position)
        aspects = sorted(first_with_aspect)
        self._interval_bucket = [self.buckets[first_with_aspect[aspect]] for aspect in aspects]
        self._interval_id = np.array([bucket["id"] for bucket in self._interval_bucket], dtype=np.intp)
        assert len(aspects) <= 256, "more aspect ratios than a byte can count"
        self._borders = [
            _last_aspect_nearer_to(low, high, ties_go_low=first_with_aspect[low] < first_with_aspect[high])
            for low, high in pairwise(aspects)
        ]

    def _print_bucket_summary(self) -> None:
        """Log one line per bucket."""
        logger.info("%d resolution buckets within %d pixels:", len(self.buckets), self.max_pixels)
        for bucket in self.buckets:
            width, height = bucket["resolution"]
            logger.info(
                "  %4dx%-4d  aspect %.3f  %d pixels", width, height, bucket["aspect_ratio"], bucket["pixels"]
            )

    def get_all_buckets(self) -> list[dict[str, Any]]:
        """All buckets, tallest first."""
        return self.buckets

    def get_bucket_by_id(self, bucket_id: int) -> dict[str, Any]:
        """The bucket with this id."""
        if bucket_id not in self._buckets_by_id:
            raise ConfigError(
                f"there is no bucket {bucket_id}; there are {', '.join(map(str, self._buckets_by_id))}"
            )
        return self._buckets_by_id[bucket_id]

    def get_bucket_by_resolution(self, width: int, height: int) -> dict[str, Any] | None:
        """The bucket of exactly this size, or None."""
        return self.buckets_by_resolution.get((width, height))

    # ---- the bucket for a picture -----------------------------------------------------------

    def get_bucket_for_image(self, image_width: int, image_height: int) -> dict[str, Any]:
        """The bucket whose aspect ratio is nearest to the picture's."""
        _require_positive("image", image_width, image_height)
        interval = bisect_left(self._borders, image_width / image_height)
        return self._interval_bucket[interval]

    def assign(self, widths: npt.ArrayLike, heights: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """Bucket ids for whole arrays of sizes: the bucket of the nearest aspect ratio, for each pair.

        >>> MultiTierBucketCalculator().assign([4000, 3000], [3000, 4000]).tolist()
        [3, 1]
        """
        width, height = np.asarray(widths), np.asarray(heights)
        if width.shape != height.shape or width.ndim != 1:
            raise ConfigError(
                f"widths and heights must be two flat arrays of one length; "
                f"they have shapes {width.shape} and {height.shape}"
            )
        ids = np.empty(len(width), dtype=np.intp)
        for start in range(0, len(width), _ASSIGN_CHUNK):
            part = slice(start, start + _ASSIGN_CHUNK)
            ids[part] = self._assign_chunk(width[part], height[part])
        return ids

    def _assign_chunk(self, width: npt.NDArray[Any], height: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
        if not (width.min() > 0 and height.min() > 0):
            bad = int(np.flatnonzero(~((width > 0) & (height > 0)))[0])
            _require_positive("image", width[bad], height[bad])
        aspect = width / height
        # With some dozen borders, counting those below beats a binary search six times over.
        interval = np.zeros(len(aspect), dtype=np.uint8)
        for border in self._borders:
            interval += (aspect > border).view(np.uint8)
        ids: npt.NDArray[np.intp] = self._interval_id[interval]
        return ids

    def get_dynamic_batch_size(
        self,
        resolution: tuple[int, int],
        base_batch_size: int = 32,
        base_resolution: tuple[int, int] = (512, 512),
    ) -> int:
        """The batch size that holds about as many pixels as ``base_batch_size`` at ``base_resolution``."""
        _require_positive("resolution", *resolution)
        _require_positive("base_resolution", *base_resolution)
        if base_batch_size < 1:
            raise ConfigError(f"base_batch_size is {base_batch_size}; it must be at least 1")
        scale = (resolution[0] * resolution[1]) / (base_resolution[0] * base_resolution[1])
        return max(1, int(base_batch_size / scale))

    # ---- cutting ----------------------------------------------------------------------------

    def resize_and_crop(
        self,
        image: Image.Image | npt.NDArray[Any],
        target_width: int,
        target_height: int,
        crop_mode: str = "center",
        *,
        seed: Seed = None,
    ) -> tuple[Image.Image | npt.NDArray[Any], int, int]:
        """Scale to cover the target, keep a window of exactly the target's size.

        >>> picture, left, top = calculator.resize_and_crop(picture, 576, 448, "smart")

        The offsets are those of the window in the scaled picture. ``random`` draws them from
        ``seed`` (a number or a generator); ``smart`` keeps the window with the most detail. A
        numpy array in gives a numpy array out.
        """
        from PIL import Image

        if not isinstance(image, Image.Image):
            picture, left, top = self.resize_and_crop(
                _image_from_array(image), target_width, target_height, crop_mode, seed=seed
            )
            return np.array(picture), left, top
        if image.mode in ("1", "P"):  # Pillow cannot interpolate bits or palette entries
            image = image.convert("RGBA" if "transparency" in image.info else "RGB")
        scaled, (left, top) = choose_window(image, (target_width, target_height), crop_mode, seed)
        # Resampling only the window's source box gives the pixels of scaling everything and
        # cropping, without ever holding what is cropped away (a 1 x 10,000 banner stays small).
        step_x, step_y = image.width / scaled[0], image.height / scaled[1]
        box = (
            left * step_x,
            top * step_y,
            min((left + target_width) * step_x, image.width),
            min((top + target_height) * step_y, image.height),
        )
        window = image.resize((target_width, target_height), Image.Resampling.LANCZOS, box=box)
        return window, left, top


def choose_window(
    image: Image.Image | npt.NDArray[Any], target: tuple[int, int], crop_mode: str, seed: Seed = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The size to scale a picture to, and the offset in it of the window of the target's size to keep."""
    _require_positive("target", *target)
    if crop_mode not in CROP_MODES:
        raise ConfigError(f"unknown crop_mode {crop_mode!r}; choose one of {', '.join(CROP_MODES)}")
    size = (image.shape[1], image.shape[0]) if isinstance(image, np.ndarray) else image.size
    _require_positive("image", *size)
    scaled = covering_size(size, target)
    room_x, room_y = scaled[0] - target[0], scaled[1] - target[1]
    if crop_mode == "center" or room_x == room_y == 0:
        return scaled, (room_x // 2, room_y // 2)
    if crop_mode == "random":
        return scaled, _draw_offsets(room_x, room_y, seed)
    picture = _image_from_array(image) if isinstance(image, np.ndarray) else image
    return scaled, _most_detailed_offsets(picture, scaled, target)


def covering_size(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """The smallest (width, height) of ``size``'s shape that covers ``target``, in whole pixels.

    >>> covering_size((4000, 3000), (576, 448))
    (597, 448)

    One side equals the target's; the other is the nearest whole number, never below the target.
    """
    (width, height), (target_width, target_height) = size, target
    if target_width * height >= target_height * width:
        return target_width, max(target_height, (2 * height * target_width + width) // (2 * width))
    return max(target_width, (2 * width * target_height + height) // (2 * height)), target_height


def _last_aspect_nearer_to(low: float, high: float, *, ties_go_low: bool) -> float:
    """The largest float that a nearest-aspect comparison still gives to ``low`` rather than ``high``.

    Bisects over the floats themselves, because the rounded midpoint can be off by one unit.
    """

    def goes_low(aspect: float) -> bool:
        to_low, to_high = abs(low - aspect), abs(high - aspect)
        return to_low < to_high or (ties_go_low and to_low == to_high)

    inside, outside = low, high
    while (middle := (inside + outside) / 2) not in (inside, outside):
        if goes_low(middle):
            inside = middle
        else:
            outside = middle
    return inside


def _require_positive(what: str, width: int, height: int) -> None:
    if not (width > 0 and height > 0):
        raise ConfigError(f"{what} size is {width}x{height}; both sides must be positive")


def _image_from_array(array: npt.NDArray[Any]) -> Image.Image:
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
        _require_positive("image", array.shape[1], array.shape[0])
    return Image.fromarray(array)


def _draw_offsets(room_x: int, room_y: int, seed: Seed) -> tuple[int, int]:
    if isinstance(seed, np.random.Generator):
        return int(seed.integers(0, room_x, endpoint=True)), int(seed.integers(0, room_y, endpoint=True))
    try:
        generator = seed if isinstance(seed, random.Random) else random.Random(seed and operator.index(seed))
    except TypeError:
        raise ConfigError(
            f"seed is a {type(seed).__name__}; give a whole number, a random.Random or a numpy Generator"
        ) from None
    return generator.randint(0, room_x), generator.randint(0, room_y)


def _most_detailed_offsets(
    image: Image.Image, scaled: tuple[int, int], target: tuple[int, int]
) -> tuple[int, int]:
    """Where the window holds the most gradient energy; the centre where nothing stands out.

    Detail is judged on a small grey copy, in which noise and grain have averaged out.
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
    room = length - window
    if room == 0:
        return 0
    offsets = np.arange(room + 1) if room < 4096 else np.linspace(0, room, 4097).astype(np.int64)
    cumulative = np.concatenate([[0.0], np.cumsum(profile)])
    knots = np.linspace(0, length, len(cumulative))
    covered = np.interp(offsets + window, knots, cumulative) - np.interp(offsets, knots, cumulative)
    best = offsets[covered >= covered.max() - 1e-9 * max(1.0, cumulative[-1])]
    return int(best[np.argmin(np.abs(best - room // 2))])
