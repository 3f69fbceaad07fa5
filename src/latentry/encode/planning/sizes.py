"""What becomes of an input's size: how far it is scaled, how much is cropped, and which inputs that rules out.

Scaling up invents pixels and cropping loses some. Neither can be seen in a latent, so the plan says how much of both
happens, before anything is encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

from latentry.errors import ConfigError
from latentry.media.images import NO_CROP
from latentry.types import Bucket, SizeChange


def size_change(size: tuple[int, int], bucket: tuple[int, int], crop_mode: str = "center") -> SizeChange:
    """What becomes of one input.

    >>> size_change((100, 50), (200, 200))
    SizeChange(upscale=4.0, crop=0.5, stretch=1.0)

    Args:
        size: (width, height) of the input, as displayed.
        bucket: (width, height) of the sample.
        crop_mode: How it is cut; ``none`` scales both sides separately and crops nothing.
    """
    (width, height), (bucket_width, bucket_height) = size, bucket
    upscale = max(1.0, bucket_width / width, bucket_height / height)
    # In whole numbers, so that equal aspect ratios give exactly 1.
    sides = (bucket_width * height, bucket_height * width)
    if crop_mode == NO_CROP:
        return SizeChange(upscale, 0.0, max(sides) / min(sides))
    return SizeChange(upscale, 1 - min(sides) / max(sides), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRules:
    """Which inputs are large enough, and how much they may be changed. None is no limit."""

    crop_mode: str = "center"
    min_pixels: int | None = None
    min_side: int | None = None
    max_upscale: float | None = None
    max_crop: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("min_pixels", self.min_pixels), ("min_side", self.min_side)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.max_upscale is not None and not self.max_upscale >= 1:
            raise ConfigError(f"max_upscale is {self.max_upscale:g}; it must be at least 1, for no upscaling")
        if self.max_crop is not None and not 0 <= self.max_crop <= 1:
            raise ConfigError(f"max_crop is {self.max_crop:g}; it is a share of the picture, from 0 to 1")
        if self.max_crop is not None and self.crop_mode == NO_CROP:
            raise ConfigError("max_crop has no effect if nothing is cropped; leave it out, or crop")

    def change(self, size: tuple[int, int], bucket: Bucket) -> SizeChange:
        """What becomes of an input of this size in this bucket."""
        return size_change(size, bucket.resolution, self.crop_mode)

    def broken_by(self, size: tuple[int, int], bucket: Bucket) -> str | None:
        """Why an input is left out: the first limit that it breaks. The same limit always gives the same text."""
        change = self.change(size, bucket)
        if self.min_pixels is not None and size[0] * size[1] < self.min_pixels:
            return f"has fewer than {self.min_pixels} pixels (min_pixels)"
        if self.min_side is not None and min(size) < self.min_side:
            return f"has a side shorter than {self.min_side} pixels (min_side)"
        if self.max_upscale is not None and change.upscale > self.max_upscale:
            return f"would be scaled up by more than {self.max_upscale:g}x (max_upscale)"
        if self.max_crop is not None and change.crop > self.max_crop:
            return f"would lose more than {self.max_crop:.0%} of its area to cropping (max_crop)"
        return None


class SizeSummary:
    """Collects what becomes of the samples of a run: means per bucket, and the inputs that change most."""

    def __init__(self, rules: SizeRules) -> None:
        self._rules = rules
        self._sums: dict[Bucket, list[float]] = {}
        self._large = [_LargeChanges(*kind) for kind in _KINDS]

    def add(self, name: str, size: tuple[int, int], bucket: Bucket) -> None:
        """Count a sample.

        Args:
            name: The name of its input. Several samples of one input are warned about once.
            size: (width, height) of the input.
            bucket: The sample's bucket.
        """
        change = self._rules.change(size, bucket)
        sums = self._sums.setdefault(bucket, [0, 0.0, 0.0, 0.0])
        for i, value in enumerate((1, change.upscale, change.crop, change.stretch)):
            sums[i] += value
        for large in self._large:
            large.add(name, size, bucket, change)

    def means(self) -> dict[Bucket, SizeChange]:
        """The mean change of the samples of each bucket."""
        return {
            bucket: SizeChange(upscale / count, crop / count, stretch / count)
            for bucket, (count, upscale, crop, stretch) in self._sums.items()
        }

    def warnings(self) -> tuple[str, ...]:
        """One sentence for each kind of large change, with the number of inputs and the one that changes most."""
        return tuple(large.sentence() for large in self._large if large.names)


class _LargeChanges:
    """The inputs that one kind of change alters by more than a limit."""

    def __init__(self, field: str, limit: float, what: str, amount: str) -> None:
        self._field, self._limit, self._what, self._amount = field, limit, what, amount
        self._worst = limit
        self._example = ""
        self.names: set[str] = set()

    def add(self, name: str, size: tuple[int, int], bucket: Bucket, change: SizeChange) -> None:
        value = getattr(change, self._field)
        if value > self._limit:
            self.names.add(name)
        if value > self._worst:
            amount = self._amount.format(value)
            self._worst = value
            self._example = f"{name} by {amount}, from {size[0]}x{size[1]} to {bucket.folder}"

    def sentence(self) -> str:
        count = len(self.names)
        inputs = "1 input is" if count == 1 else f"{count} inputs are"
        example = self._example if count == 1 else f"for example {self._example}"
        return f"{inputs} {self._what} by more than {self._amount.format(self._limit)}: {example}"


_KINDS = (
    ("upscale", 2.0, "scaled up", "{:.4g}x"),
    ("crop", 0.5, "cropped", "{:.0%}"),
    ("stretch", 1.5, "stretched out of shape", "{:.4g}x"),
)
"""The field of a change, the limit above which it is warned about, its verb, and how amounts are written."""
