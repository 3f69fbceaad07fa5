from __future__ import annotations

import random

import numpy as np
import pytest
from helpers import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from latentry.buckets import MultiTierBucketCalculator, parse_aspect_ratio
from latentry.crops import covering_size
from latentry.errors import ConfigError

SIDES = st.integers(1, 20_000)


@pytest.mark.parametrize(
    "case", golden("buckets.json"), ids=lambda c: f"{c['quantization']}-{c['max_pixels']}"
)
def test_golden_files(case):
    calculator = MultiTierBucketCalculator(case["quantization"], case["max_pixels"])
    assert [b | {"resolution": list(b["resolution"])} for b in calculator.get_all_buckets()] == case[
        "buckets"
    ]
    for width, height, *expected in case["images"]:
        bucket = calculator.get_bucket_for_image(width, height)
        assert [bucket["id"], *bucket["resolution"]] == expected
    for width, height, batch, base_width, base_height, expected in case["dynamic_batch_size"]:
        size = calculator.get_dynamic_batch_size((width, height), batch, (base_width, base_height))
        assert size == expected


def test_presets_and_default():
    assert MultiTierBucketCalculator().max_pixels == 256 * 256
    for side in (256, 512, 768, 1024, 1536):
        assert MultiTierBucketCalculator.from_preset(f"{side}p").max_pixels == side * side
    assert MultiTierBucketCalculator.from_preset("512p", quantization=16).quantization == 16


@given(width=SIDES, height=SIDES, quantization=st.sampled_from([8, 16, 64]), side=st.integers(64, 2048))
def test_nearest_aspect_ratio_is_chosen(width, height, quantization, side):
    calculator = MultiTierBucketCalculator(quantization, max_pixels=side * side)
    nearest = min(calculator.buckets, key=lambda b: abs(b["aspect_ratio"] - width / height))
    assert calculator.get_bucket_for_image(width, height) is nearest
    assert calculator.assign([width], [height]).tolist() == [nearest["id"]]


@given(quantization=st.sampled_from([1, 8, 16, 64]), side=st.integers(64, 2048))
def test_buckets_are_on_the_grid_and_within_the_budget(quantization, side):
    calculator = MultiTierBucketCalculator(quantization, max_pixels=side * side)
    for number, bucket in enumerate(calculator.buckets):
        width, height = bucket["resolution"]
        assert width % quantization == height % quantization == 0
        assert width * height == bucket["pixels"] <= side * side
        assert calculator.get_bucket_by_id(number) is bucket
        assert calculator.get_bucket_by_resolution(width, height) is bucket
    assert calculator.get_bucket_by_resolution(1, 99_999) is None


def test_assign_at_borders_between_buckets():
    calculator = MultiTierBucketCalculator.from_preset("1536p", quantization=16)
    borders = np.array(calculator._borders)
    # Sizes whose aspect ratios are on, just below and just above every border, as far as integers allow.
    heights = np.arange(1, 3000)
    widths = np.concatenate(
        [np.round(border * heights).astype(int) + d for border in borders for d in (-1, 0, 1)]
    )
    heights = np.tile(heights, 3 * len(borders))
    keep = widths > 0
    assigned = calculator.assign(widths[keep], heights[keep])
    expected = [
        min(calculator.buckets, key=lambda b: abs(b["aspect_ratio"] - w / h))["id"]
        for w, h in zip(widths[keep].tolist(), heights[keep].tolist(), strict=True)
    ]
    assert assigned.tolist() == expected


def test_assign_empty_and_long_arrays():
    calculator = MultiTierBucketCalculator()
    assert calculator.assign([], []).tolist() == []
    assert (calculator.assign(np.full(200_000, 640), np.full(200_000, 480)) == 3).all()


def test_subclasses_with_other_buckets():
    class Squares(MultiTierBucketCalculator):
        ASPECT_RATIOS = ((1, 1),)

    class Unsorted(MultiTierBucketCalculator):
        def _generate_all_buckets(self):
            return [{**b, "id": i} for i, b in enumerate(reversed(super()._generate_all_buckets()))]

    class WideOnly(MultiTierBucketCalculator):
        RESOLUTION_PRESETS = {"small": 64 * 64 * 9}  # noqa: RUF012

        def _generate_all_buckets(self):
            return [b for b in super()._generate_all_buckets() if b["aspect_ratio"] >= 1]

    wide = WideOnly(max_pixels=512 * 512)
    bucket = wide.get_bucket_for_image(1600, 900)
    assert wide.get_bucket_by_id(bucket["id"]) is bucket
    assert wide.assign([1600], [900]).tolist() == [bucket["id"]]
    assert WideOnly().max_pixels == 256 * 256
    assert [b["resolution"] for b in Squares(max_pixels=512 * 512).buckets] == [(512, 512)]
    calculator = Unsorted()
    ids = calculator.assign([100, 100, 300], [300, 100, 100])
    assert [calculator.buckets[i]["resolution"] for i in ids] == [(192, 320), (256, 256), (320, 192)]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: MultiTierBucketCalculator(0), "quantization is 0"),
        (lambda: MultiTierBucketCalculator(64, 4095), "max_pixels is 4095.*at least 4096"),
        (lambda: MultiTierBucketCalculator.from_preset("640p"), "'640p'.*256p, 512p, 768p, 1024p, 1536p"),
        (lambda: MultiTierBucketCalculator().get_bucket_for_image(0, 5), "0x5"),
        (lambda: MultiTierBucketCalculator().get_bucket_for_image(5, -1), "5x-1"),
        (lambda: MultiTierBucketCalculator().assign([5, 0], [5, 5]), "0x5"),
        (lambda: MultiTierBucketCalculator().assign([5, 4], [5]), r"shapes \(2,\) and \(1,\)"),
        (lambda: MultiTierBucketCalculator().get_bucket_by_id(99), "no bucket 99"),
        (lambda: MultiTierBucketCalculator().get_dynamic_batch_size((64, 0)), "64x0"),
        (lambda: MultiTierBucketCalculator().get_dynamic_batch_size((64, 64), 0), "base_batch_size is 0"),
        (lambda: crop(Image.new("RGB", (9, 9)), 4, 4, "middle"), "'middle'.*center, random, smart"),
        (lambda: crop(Image.new("RGB", (9, 9)), 0, 4), "0x4"),
        (lambda: crop(np.zeros((9, 9, 3)), 4, 4), "float64"),
        (lambda: crop(np.zeros((0, 9, 3), np.uint8), 4, 4), "9x0"),
        (lambda: crop("cat.jpg", 4, 4), "str"),
    ],
)
def test_invalid_input(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


# ---- resize_and_crop ------------------------------------------------------------------------


def crop(image, width, height, mode="center", **options):
    return MultiTierBucketCalculator().resize_and_crop(image, width, height, mode, **options)


@given(size=st.tuples(SIDES, SIDES), target=st.tuples(st.integers(1, 3000), st.integers(1, 3000)))
def test_covering_size(size, target):
    width, height = covering_size(size, target)
    assert width >= target[0]
    assert height >= target[1]
    assert width == target[0] or height == target[1]
    # Within half a pixel of the exact aspect ratio, unless the target needs one pixel more.
    exact_height = size[1] * width / size[0]
    exact_width = size[0] * height / size[1]
    assert abs(height - exact_height) <= 0.51 or abs(width - exact_width) <= 0.51 or (width, height) == target


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    target=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    mode=st.sampled_from(["center", "random", "smart"]),
)
def test_crop_has_the_target_size_and_no_border(size, target, mode):
    white = Image.new("L", size, 255)
    image, left, top = crop(white, *target, mode, seed=3)
    assert image.size == target
    assert image.getextrema() == (255, 255)
    scaled = covering_size(size, target)
    assert 0 <= left <= scaled[0] - target[0]
    assert 0 <= top <= scaled[1] - target[1]


def test_crop_equals_scaling_and_cutting():
    noise = np.random.default_rng(0).integers(0, 256, (301, 517, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((1034, 602), Image.Resampling.BICUBIC)
    window, left, top = crop(image, 256, 192)
    whole = image.resize(covering_size(image.size, (256, 192)), Image.Resampling.LANCZOS)
    expected = whole.crop((left, top, left + 256, top + 192))
    difference = np.abs(np.asarray(window, dtype=int) - np.asarray(expected, dtype=int))
    assert difference.max() <= 1


def test_extreme_aspect_ratio():
    image, left, top = crop(Image.new("RGB", (1, 20_000), "red"), 512, 512)
    assert (image.size, left) == ((512, 512), 0)
    assert top == (20_000 * 512 - 512) // 2


def test_array_in_array_out():
    image = np.zeros((40, 60, 3), np.uint8)
    result, left, top = crop(image, 32, 32)
    assert isinstance(result, np.ndarray)
    assert (result.shape, result.dtype, left, top) == ((32, 32, 3), np.uint8, 8, 0)


def test_palette_images_are_interpolated():
    stripes = Image.fromarray(np.tile(np.array([[0, 255]], np.uint8), (64, 32))).convert("P")
    image, _, _ = crop(stripes, 16, 16)
    assert image.mode == "RGB"
    assert 100 < np.asarray(image).mean() < 155


def test_random_crops_depend_on_the_seed():
    image = Image.new("RGB", (900, 100))
    offsets = {crop(image, 64, 64, "random", seed=seed)[1] for seed in range(20)}
    assert len(offsets) > 10
    assert crop(image, 64, 64, "random", seed=7)[1:] == crop(image, 64, 64, "random", seed=7)[1:]
    for make in (random.Random, np.random.default_rng):
        assert (
            crop(image, 64, 64, "random", seed=make(1))[1:] == crop(image, 64, 64, "random", seed=make(1))[1:]
        )
        generator = make(1)
        drawn = {crop(image, 64, 64, "random", seed=generator)[1] for _ in range(20)}
        assert len(drawn) > 10, "each crop draws the next numbers of a generator"


@pytest.mark.parametrize("where", [0, 150, 420])
@pytest.mark.parametrize("upright", [False, True])
def test_smart_crop_keeps_the_most_detail(where, upright):
    rng = np.random.default_rng(0)
    # Fine noise everywhere, like film grain, and one patch of large-scale structure.
    pixels = rng.integers(120, 136, (100, 600), dtype=np.uint8)
    pixels[10:90, where : where + 80] = np.kron(rng.integers(0, 2, (8, 8)) * 255, np.ones((10, 10)))
    image = Image.fromarray(pixels.T.copy() if upright else pixels)
    _, *offsets = crop(image, 100, 100, "smart")
    offset = offsets[1] if upright else offsets[0]
    assert max(0, where - 20) <= offset <= where


def test_results_are_writable_and_invalid_seeds_are_refused():
    result, _, _ = crop(np.zeros((40, 60, 3), np.uint8), 32, 32)
    result[0, 0] = 1
    assert crop(Image.new("RGB", (90, 30)), 8, 8, "random", seed=np.int64(3))[1] >= 0
    with pytest.raises(ConfigError, match="seed is a str"):
        crop(Image.new("RGB", (90, 30)), 8, 8, "random", seed="3")


def test_smart_crop_of_a_uniform_image_is_the_centre():
    assert crop(Image.new("RGB", (300, 100)), 100, 100, "smart")[1:] == (100, 0)


# ---- chosen aspect ratios -------------------------------------------------------------------

RATIOS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8, unique=True)


def _is_rounded(width, height, ratio, step):
    """Whether the longer side is that of the ratio, give or take some steps: more for longer shapes."""
    long, short = (width, height) if ratio >= 1 else (height, width)
    ratio = max(ratio, 1 / ratio)
    return abs(long - short * ratio) <= (2.5 + ratio) * step


@given(
    ratios=RATIOS,
    step=st.sampled_from([8, 16, 32]),
    side=st.integers(384, 2048),
    width=SIDES,
    height=SIDES,
)
def test_chosen_aspect_ratios(ratios, step, side, width, height):
    calculator = MultiTierBucketCalculator(step, side * side, aspect_ratios=ratios)
    assert 1 <= len(calculator.buckets) <= len(ratios)
    for bucket in calculator.buckets:
        w, h = bucket["resolution"]
        assert w % step == h % step == 0
        assert 0 < w * h <= side * side
        # Its shape is one of the list, up to rounding to the grid and into the budget.
        assert any(_is_rounded(w, h, a / b, step) for a, b in ratios), f"{w}x{h} is none of {ratios}"
    bucket = calculator.get_bucket_for_image(width, height)
    assert bucket is min(calculator.buckets, key=lambda b: abs(b["aspect_ratio"] - width / height))
    assert calculator.assign([width], [height]).tolist() == [bucket["id"]]


def test_the_standard_ratios_chosen_by_hand_change_nothing():
    for step, pixels in ((64, 256 * 256), (16, 512 * 512)):
        chosen = MultiTierBucketCalculator(
            step, pixels, aspect_ratios=MultiTierBucketCalculator.ASPECT_RATIOS
        )
        assert chosen.buckets == MultiTierBucketCalculator(step, pixels).buckets


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        ([(1, 1), (99, 1)], "the aspect ratio 99:1 does not fit into 65536 pixels on a grid of 64"),
        ([(0, 1)], "aspect ratio size is 0x1"),
        ([], "there are 0 aspect ratios; give 1 to 256"),
        ([(n, n + 1) for n in range(1, 300)], "there are 299 aspect ratios"),
    ],
)
def test_unusable_aspect_ratios_are_named(ratios, says):
    with pytest.raises(ConfigError, match=says):
        MultiTierBucketCalculator(aspect_ratios=ratios)


@given(width=st.integers(1, 10_000), height=st.integers(1, 10_000))
def test_aspect_ratios_are_parsed_in_lowest_terms(width, height):
    a, b = parse_aspect_ratio(f"{width}:{height}")
    assert a * height == b * width
    assert np.gcd(a, b) == 1
