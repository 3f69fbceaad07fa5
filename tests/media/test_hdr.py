"""The tone-mapping rule, against numbers of the standards that it names."""

from __future__ import annotations

import numpy as np
import pytest

from latentry import Recipe
from latentry.errors import ConfigError
from latentry.media.hdr import compress_nits, tone_map


def grey(code: float) -> np.ndarray:
    return np.full((1, 3), code)


def srgb(nits: float) -> float:
    """The 8-bit sRGB value of light, with 203 nits as white."""
    linear = nits / 203
    return 255 * (12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055)


def pq_nits(code: float) -> float:
    """SMPTE ST 2084, in the notation of the standard."""
    m1, m2, c1, c2, c3 = 0.1593017578125, 78.84375, 0.8359375, 18.8515625, 18.6875
    root = code ** (1 / m2)
    return 10000 * (max(root - c1, 0) / (c2 - c3 * root)) ** (1 / m1)


# PQ code values and their light in nits.
@pytest.mark.parametrize(
    ("code", "nits"), [(0.0, 0.0), (0.1, 0.3246), (0.2, 2.4323), (0.38, 26.3), (0.4, 32.46)]
)
def test_dark_pq_is_unchanged(code, nits):
    assert tone_map(grey(code), "pq")[0, 1] == pytest.approx(srgb(nits), abs=0.8)


def test_whites_and_peaks():
    assert tone_map(grey(0.58069), "pq").tolist() == [[229, 229, 229]], "203 nits"
    assert tone_map(grey(0.75), "hlg").tolist() == [[229, 229, 229]], "203 nits, by the definition of HLG"
    for code, transfer in ((0.7518, "pq"), (0.9, "pq"), (1.0, "pq"), (1.0, "hlg"), (1.3, "hlg")):
        assert tone_map(grey(code), transfer).tolist() == [[255, 255, 255]]
    for transfer in ("pq", "hlg"):
        assert tone_map(grey(0.0), transfer).tolist() == [[0, 0, 0]]
        assert tone_map(grey(-0.1), transfer).tolist() == [[0, 0, 0]]


def test_grey_hlg_agrees_with_pq_of_the_same_light():
    """An HLG signal of 0.5 is 1/12 of the scene's peak, which is shown as 1000 * (1/12)**1.2 nits."""
    nits = 1000 * (1 / 12) ** 1.2
    assert tone_map(grey(0.5), "hlg")[0, 0] == pytest.approx(srgb(nits), abs=0.8)


def test_curve_is_the_eetf_of_bt2390():
    nits = np.array([1.0, 50.0, 87.0, 203.0, 1000.0, 4000.0])
    assert compress_nits(nits) == pytest.approx([1.0, 50.0, 87.0, 159.04, 203.0, 203.0], rel=1e-4)
    ramp = compress_nits(np.linspace(0, 1000, 5001))
    steps = np.diff(ramp)
    assert (steps >= -1e-9).all(), "never falls"
    assert (np.diff(steps) <= 1e-6).all(), "never becomes steeper"


@pytest.mark.parametrize("transfer", ["pq", "hlg"])
@pytest.mark.parametrize("primaries", ["bt709", "bt2020", "p3"])
def test_grey_stays_grey(transfer, primaries):
    pixels = tone_map(np.repeat(np.linspace(0, 1, 500)[:, None], 3, 1), transfer, primaries).astype(int)
    assert np.abs(pixels - pixels[:, :1]).max() <= 1
    assert (np.diff(pixels[:, 0]) >= 0).all()


def test_hue_is_kept_under_compression():
    """Bright orange of the gamut of sRGB: the ratio of linear channels is the same before and after."""
    bright = tone_map(np.array([[0.70, 0.58, 0.40]]), "pq", "bt709")[0] / 255
    linear = np.where(bright <= 0.04045, bright / 12.92, ((bright + 0.055) / 1.055) ** 2.4)
    nits = np.array([pq_nits(0.70), pq_nits(0.58), pq_nits(0.40)])
    assert linear / linear[0] == pytest.approx(nits / nits[0], rel=0.05)


def test_primaries():
    red = np.array([[0.5, 0.0, 0.0]])
    assert tone_map(red, "pq", "bt709")[0, 1:].tolist() == [0, 0]
    narrow = [tone_map(red, "pq", name)[0, 0] for name in ("bt709", "p3", "bt2020")]
    assert narrow[0] < narrow[1] < narrow[2], "the red of a wider gamut is brighter in sRGB"
    sample = np.array([[0.4, 0.45, 0.42]])
    light = np.array([pq_nits(code) for code in sample[0]])
    matrix = [[1.660491, -0.587641, -0.07285], [-0.12455, 1.1329, -0.008349], [-0.018151, -0.100579, 1.11873]]
    expected = [srgb(value) for value in np.array(matrix) @ light]
    assert tone_map(sample, "pq", "bt2020")[0] == pytest.approx(expected, abs=0.8)


def test_any_shape_and_dtype():
    frames = np.random.default_rng(0).random((2, 300, 301, 3))
    expected = np.stack([tone_map(frame, "hlg") for frame in frames])
    assert (tone_map(frames, "hlg") == expected).all()
    assert tone_map(frames.astype(np.float32)[..., ::-1, :], "hlg").shape == frames.shape
    assert tone_map(frames[:0], "pq").shape == (0, 300, 301, 3)


def test_recipe_refuses_unknown_modes():
    with pytest.raises(ConfigError, match="unknown hdr 'off'; choose one of tonemap, skip"):
        Recipe(hdr="off")
