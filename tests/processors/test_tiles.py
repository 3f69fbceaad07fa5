"""Tiles cover everything, fit, and blend. The encoder here averages blocks, so tiles must give exactly the whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from latentry.processors.tiles import Tiles, decode_tiles, encode_tiles, largest_tiles

sides = st.integers(1, 40).map(lambda n: 16 * n)


def block_means(pixels: torch.Tensor) -> torch.Tensor:
    flat = F.avg_pool2d(pixels.flatten(0, -4).float(), 8)
    return flat.view(*pixels.shape[:-2], *flat.shape[-2:])


@given(sides, sides, st.integers(1, 700_000))
def test_tiles_of_any_size_give_the_whole(height, width, most_pixels):
    tiles = largest_tiles(height, width, 16, lambda h, w: h * w <= most_pixels)
    pixels = torch.rand(1, 3, height, width)
    seen = []

    def encode(tile: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tile.shape[-2:]))
        return block_means(tile)

    assert torch.allclose(encode_tiles(encode, pixels, tiles, 8), block_means(pixels), atol=1e-5)
    assert set(seen) == {tiles[:2]}, "one shape, so that one CUDA graph serves all tiles"
    assert tiles.height * tiles.width <= most_pixels or max(tiles[:2]) <= 64
    assert tiles.overlap == 96 or min(tiles[:2]) <= 192
    assert tiles.height % 16 == tiles.width % 16 == 0


@given(sides, sides, st.integers(1, 700_000))
def test_decoding_in_tiles_of_any_size_gives_the_whole(height, width, most_pixels):
    tiles = largest_tiles(height, width, 16, lambda h, w: h * w <= most_pixels)
    latents = torch.rand(1, 3, height // 8, width // 8)

    def decode(tile: torch.Tensor) -> torch.Tensor:
        return F.interpolate(tile, scale_factor=8)

    assert torch.allclose(decode_tiles(decode, latents, tiles, 8), decode(latents), atol=1e-5)


def test_clips_are_tiled_in_space_only():
    clip = torch.rand(2, 3, 5, 320, 480)
    mine = encode_tiles(block_means, clip, Tiles(256, 256, 96), 8)
    assert torch.allclose(mine, block_means(clip), atol=1e-5)


def test_neighbouring_tiles_fade_into_each_other():
    """A tile that is one everywhere beside one that is zero gives a ramp, without a step."""
    values = iter([0.0, 1.0])

    def encode(tile: torch.Tensor) -> torch.Tensor:
        return torch.full((1, 1, tile.shape[-2] // 8, tile.shape[-1] // 8), next(values))

    row = encode_tiles(encode, torch.zeros(1, 3, 64, 512), Tiles(64, 304, 96), 8)[0, 0, 0]
    assert row[0] == 0
    assert row[-1] == 1
    steps = row.diff()
    assert (steps >= 0).all()
    assert steps.max() < 0.1
    assert (steps > 0).sum() >= 96 // 8 - 1
