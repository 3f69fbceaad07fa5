"""Tiles: overlapping parts of an image or a clip that are encoded or decoded one after the other, and blended.

The last resort where memory is short. A tile does not see what is outside of it, so the results differ a little
from those of the whole. Tiles are as large as the memory allows, which makes the differences as small as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

_OVERLAPS = (96, 32)
"""By how many pixels neighbouring tiles overlap. The second is for tiles that are smaller than twice the first."""


class Tiles(NamedTuple):
    """The size of tiles and their overlap, in pixels."""

    height: int
    width: int
    overlap: int


def largest_tiles(height: int, width: int, multiple: int, fits: Callable[[int, int], bool]) -> Tiles:
    """The largest tiles that fit, or the smallest tiles if none do.

    Args:
        height: The height of the whole.
        width: Its width.
        multiple: Sides of tiles are multiples of this many pixels.
        fits: Whether a tile of this height and width fits into the memory.
    """
    tiles = Tiles(height, width, _OVERLAPS[0])
    for overlap in _OVERLAPS:
        rows = columns = 1
        while not fits(tiles.height, tiles.width) and max(tiles.height, tiles.width) > 2 * overlap:
            if tiles.height > tiles.width:
                rows += 1
            else:
                columns += 1
            tiles = Tiles(
                _side(height, rows, overlap, multiple), _side(width, columns, overlap, multiple), overlap
            )
    return tiles


def _side(length: int, count: int, overlap: int, multiple: int) -> int:
    """The length of overlapping tiles of which this many cover a side."""
    longest = length + (count - 1) * overlap
    return min(length, -(-longest // (count * multiple)) * multiple)


def encode_tiles(
    encode: Callable[[torch.Tensor], torch.Tensor], pixels: torch.Tensor, tiles: Tiles, factor: int
) -> torch.Tensor:
    """Encode pixels in tiles. Where tiles overlap, one fades into the other.

    Args:
        encode: Encodes one tile.
        pixels: [B,3,H,W] or [B,3,T,H,W].
        tiles: The size of a tile.
        factor: Pixels per latent position.
    """
    height, width = pixels.shape[-2:]
    return _blended(encode, pixels, (height, width), tiles, factor, in_unit=1, out_unit=factor)


def decode_tiles(
    decode: Callable[[torch.Tensor], torch.Tensor], latents: torch.Tensor, tiles: Tiles, factor: int
) -> torch.Tensor:
    """Decode latents in tiles. Where tiles overlap, one fades into the other.

    Args:
        decode: Decodes one tile.
        latents: [B,C,h,w] or [B,C,t,h,w].
        tiles: The size of a tile.
        factor: Pixels per latent position.
    """
    height, width = (side * factor for side in latents.shape[-2:])
    return _blended(decode, latents, (height, width), tiles, factor, in_unit=factor, out_unit=1)


def _blended(
    apply: Callable[[torch.Tensor], torch.Tensor],
    tensor: torch.Tensor,
    whole: tuple[int, int],
    tiles: Tiles,
    factor: int,
    *,
    in_unit: int,
    out_unit: int,
) -> torch.Tensor:
    """Apply a function to tiles and blend the results. A position has ``in_unit`` or ``out_unit`` pixels per side."""
    shape = [side // out_unit for side in whole]
    blended = weights = None
    overlap = tiles.overlap // out_unit
    for top in _starts(whole[0], tiles.height, tiles.overlap, factor):
        for left in _starts(whole[1], tiles.width, tiles.overlap, factor):
            rows = slice(top // in_unit, (top + tiles.height) // in_unit)
            columns = slice(left // in_unit, (left + tiles.width) // in_unit)
            tile = apply(tensor[..., rows, columns].contiguous()).float()
            if blended is None or weights is None:
                blended, weights = tile.new_zeros(*tile.shape[:-2], *shape), tile.new_zeros(*shape)
            y, x = top // out_unit, left // out_unit
            weight = torch.outer(
                _fade(y, tile.shape[-2], shape[0], overlap).to(tile),
                _fade(x, tile.shape[-1], shape[1], overlap).to(tile),
            )
            ys, xs = slice(y, y + tile.shape[-2]), slice(x, x + tile.shape[-1])
            blended[..., ys, xs] += tile * weight
            weights[ys, xs] += weight
    assert blended is not None
    assert weights is not None
    return blended.div_(weights)


def _starts(length: int, tile: int, overlap: int, factor: int) -> Sequence[int]:
    """Where tiles begin along a side, evenly spaced; the last one ends with the side."""
    if tile >= length:
        return [0]
    count = -(-(length - overlap) // (tile - overlap))
    last = length - tile
    return [round(i * last / (count - 1) / factor) * factor for i in range(count)]


def _fade(start: int, length: int, total: int, overlap: int) -> torch.Tensor:
    """Weights along a side of a tile, which rise and fall where it has neighbours."""
    positions = torch.arange(length) + 0.5
    weights = torch.ones(length)
    if start > 0:
        weights = torch.minimum(weights, positions / overlap)
    if start + length < total:
        weights = torch.minimum(weights, (length - positions) / overlap)
    return weights
