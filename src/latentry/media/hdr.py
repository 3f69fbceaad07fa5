"""HDR pixels as SDR: PQ and HLG code values become 8-bit sRGB by one fixed rule.

1. Code values become light in nits, by SMPTE ST 2084 (PQ) or by BT.2100 (HLG, on a display of 1000 nits).
2. Light is converted to the primaries of sRGB. Colours outside of its gamut are clipped at zero.
3. The brightest channel of each pixel goes through the EETF of BT.2390, from a peak of 1000 nits to a white of
   203 nits (BT.2408). The other channels are scaled by the same factor, so hue and saturation are kept. Light
   below 88 nits is unchanged, and 1000 nits and more become white.
4. The result is encoded by the transfer function of sRGB, with 203 nits as 255.

The peak is a constant. It is not measured per image, so the frames of a clip do not flicker and a pixel's result
depends on this pixel only. Transfer functions are tables with 16-bit indices, which are exact to less than a tenth
of a grey level.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

HDR_MODES = ("tonemap", "skip")
"""What to do with HDR inputs: convert them to SDR, or report them as failures."""
TRANSFERS = {16: "pq", 18: "hlg"}
"""HDR transfer functions by their numbers in ITU-T H.273, which files carry."""
PRIMARIES = {1: "bt709", 9: "bt2020", 11: "p3", 12: "p3"}
"""Primaries by their numbers in ITU-T H.273. 11 has another white point than 12, which is ignored."""

WHITE_NITS = 203.0
PEAK_NITS = 1000.0

_FloatArray = npt.NDArray[np.float32]
_TO_BT709 = {
    "bt709": np.eye(3),
    "bt2020": np.array(
        [
            [1.660491, -0.587641, -0.072850],
            [-0.124550, 1.132900, -0.008349],
            [-0.018151, -0.100579, 1.118730],
        ]
    ),
    "p3": np.array(
        [
            [1.224940, -0.224940, 0.0],
            [-0.042057, 1.042057, 0.0],
            [-0.019638, -0.078636, 1.098274],
        ]
    ),
}
_LUMINANCE = {
    "bt709": (0.2126, 0.7152, 0.0722),
    "bt2020": (0.2627, 0.6780, 0.0593),
    "p3": (0.2290, 0.6917, 0.0793),
}
_HLG_GAMMA = 1.2
_TABLE_SIZE = 1 << 16
_CHUNK_PIXELS = 1 << 16
"""Pixels that are converted at a time, so that intermediate values stay in the processor's cache."""


def tone_map(rgb: npt.NDArray[Any], transfer: str, primaries: str = "bt2020") -> npt.NDArray[np.uint8]:
    """Convert HDR pixels to 8-bit sRGB.

    >>> tone_map(np.array([0.0, 0.58, 0.75]), "pq")

    Args:
        rgb: Non-linear code values from 0 to 1, [...,3], in full range. Values outside are clipped.
        transfer: ``pq`` or ``hlg``.
        primaries: ``bt2020``, ``bt709`` or ``p3``.

    Returns:
        uint8 of the same shape.
    """
    pixels = np.asarray(rgb).reshape(-1, 3)
    result = np.empty(pixels.shape, np.uint8)
    for start in range(0, len(pixels), _CHUNK_PIXELS):
        chunk = slice(start, start + _CHUNK_PIXELS)
        result[chunk] = _tone_map(np.ascontiguousarray(pixels[chunk].T), transfer, primaries).T
    return result.reshape(np.shape(rgb))


def _tone_map(codes: npt.NDArray[Any], transfer: str, primaries: str) -> npt.NDArray[np.uint8]:
    """``tone_map`` for planes, [3,N]."""
    light = _light_table(transfer)[_index(codes)]
    if transfer == "hlg":
        luminance = np.array(_LUMINANCE[primaries], np.float32) @ light
        light *= (PEAK_NITS / WHITE_NITS) * luminance ** np.float32(_HLG_GAMMA - 1)
    if primaries != "bt709":
        light = _TO_BT709[primaries].astype(np.float32) @ light
        np.maximum(light, 0, out=light)
    brightest = light.max(axis=0)
    gain = _gain_table()[_index(brightest * np.float32(WHITE_NITS / PEAK_NITS))]
    light *= np.minimum(gain, 1 / np.maximum(brightest, np.float32(1e-6)))
    return _srgb_table()[_index(light)]


def _index(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The index in a table for values from 0 to 1."""
    scaled: _FloatArray = np.asarray(values, np.float32) * np.float32(_TABLE_SIZE - 1) + np.float32(0.5)
    np.clip(scaled, 0, _TABLE_SIZE - 1, out=scaled)
    return scaled.astype(np.uint16)


@functools.cache
def _light_table(transfer: str) -> _FloatArray:
    """Light for code values from 0 to 1: of the display for ``pq``, 1 being white; of the scene for ``hlg``."""
    codes = np.linspace(0, 1, _TABLE_SIZE)
    if transfer == "pq":
        return (_pq_nits(codes) / WHITE_NITS).astype(np.float32)
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    scene = np.where(codes <= 0.5, codes**2 / 3, (np.exp((codes - c) / a) + b) / 12)
    return scene.astype(np.float32)


@functools.cache
def _gain_table() -> _FloatArray:
    """What light from 0 to the peak is multiplied by."""
    nits = np.linspace(0, PEAK_NITS, _TABLE_SIZE)
    nits[0] = nits[1]
    return (compress_nits(nits) / nits).astype(np.float32)


@functools.cache
def _srgb_table() -> npt.NDArray[np.uint8]:
    """8-bit sRGB for linear values from 0 to 1."""
    linear = np.linspace(0, 1, _TABLE_SIZE)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return (encoded * 255 + 0.5).astype(np.uint8)


def compress_nits(nits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The EETF of BT.2390-8, section 5.4.1, from a peak of 1000 nits to one of 203, both with a black of 0 nits."""
    peak = _pq_code(np.array(PEAK_NITS))
    target = _pq_code(np.array(WHITE_NITS)) / peak
    knee = 1.5 * target - 0.5
    code = np.minimum(_pq_code(nits) / peak, 1)
    t = np.clip((code - knee) / (1 - knee), 0, None)
    spline = (
        (2 * t**3 - 3 * t**2 + 1) * knee
        + (t**3 - 2 * t**2 + t) * (1 - knee)
        + (-2 * t**3 + 3 * t**2) * target
    )
    return _pq_nits(np.where(code < knee, code, spline) * peak)


_M1, _M2 = 2610 / 16384, 2523 / 32
_C1, _C2, _C3 = 3424 / 4096, 2413 / 128, 2392 / 128


def _pq_nits(code: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Light for PQ code values, by SMPTE ST 2084."""
    root = code ** (1 / _M2)
    return np.asarray(10000 * (np.maximum(root - _C1, 0) / (_C2 - _C3 * root)) ** (1 / _M1))


def _pq_code(nits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """PQ code values for light, by SMPTE ST 2084."""
    power = (nits / 10000) ** _M1
    return np.asarray(((_C1 + _C2 * power) / (1 + _C3 * power)) ** _M2)
