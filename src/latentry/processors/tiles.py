"""Tiles: overlapping parts of an image or a clip that are encoded or decoded one after the other, and blended.

The last resort where memory is short. A tile does not see what is outside of it, so the results differ a little
from those of the whole. Tiles are as large as the memory allows, which makes the differences as small as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

OVERLAP = 96
"""By how many pixels neighbouring tiles overlap."""


def tile_size(height: int, width: int, multiple: int, fits: Callable[[int, int], bool]) -> tuple[int, int]:
    """Height and width of the largest tiles that fit, or of the smallest tiles if none do.

    Args:
        height: The height of the whole.
        width: Its width.
        multiple: Sides of tiles are multiples of this many pixels.
        fits: Whether a tile of this height and width fits into the memory.
    """
    rows = columns = 1
    tile_height, tile_width = height, width
    while not fits(tile_height, tile_width) and max(tile_height, tile_width) > 2 * OVERLAP:
        if tile_height > tile_width:
            rows += 1
        else:
            columns += 1
        tile_height, tile_width = _side(height, rows, multiple), _side(width, columns, multiple)
    return tile_height, tile_width


def _side(length: int, count: int, multiple: int) -> int:
    """The length of overlapping tiles of which this many cover a side."""
    longest = length + (count - 1) * OVERLAP
    return min(length, -(-longest // (count * multiple)) * multiple)


def encode_tiles(
    encode: Callable[[torch.Tensor], torch.Tensor], pixels: torch.Tensor, size: tuple[int, int], factor: int
) -> torch.Tensor:
    """Encode pixels in tiles. Where tiles overlap, one fades into the other.

    Args:
        encode: Encodes one tile.
        pixels: [B,3,H,W] or [B,3,T,H,W].
        size: Height and width of a tile, in pixels.
        factor: Pixels per latent position.
    """
    height, width = pixels.shape[-2:]
    return _blended(encode, pixels, (height, width), size, factor, in_unit=1, out_unit=factor)


def decode_tiles(
    decode: Callable[[torch.Tensor], torch.Tensor], latents: torch.Tensor, size: tuple[int, int], factor: int
) -> torch.Tensor:
    """Decode latents in tiles. Where tiles overlap, one fades into the other.

    Args:
        decode: Decodes one tile.
        latents: [B,C,h,w] or [B,C,t,h,w].
        size: Height and width of a tile, in pixels.
        factor: Pixels per latent position.
    """
    height, width = (side * factor for side in latents.shape[-2:])
    return _blended(decode, latents, (height, width), size, factor, in_unit=factor, out_unit=1)


def _blended(
    apply: Callable[[torch.Tensor], torch.Tensor],
    tensor: torch.Tensor,
    whole: tuple[int, int],
    size: tuple[int, int],
    factor: int,
    *,
    in_unit: int,
    out_unit: int,
) -> torch.Tensor:
    """Apply a function to tiles and blend the results. A position has ``in_unit`` or ``out_unit`` pixels per side."""
    shape = [side // out_unit for side in whole]
    blended = weights = None
    for top in _starts(whole[0], size[0], factor):
        for left in _starts(whole[1], size[1], factor):
            rows = slice(top // in_unit, (top + size[0]) // in_unit)
            columns = slice(left // in_unit, (left + size[1]) // in_unit)
            tile = apply(tensor[..., rows, columns].contiguous()).float()
            if blended is None or weights is None:
                blended, weights = tile.new_zeros(*tile.shape[:-2], *shape), tile.new_zeros(*shape)
            y, x = top // out_unit, left // out_unit
            weight = torch.outer(
                _fade(y, tile.shape[-2], shape[0], out_unit).to(tile),
                _fade(x, tile.shape[-1], shape[1], out_unit).to(tile),
            )
            ys, xs = slice(y, y + tile.shape[-2]), slice(x, x + tile.shape[-1])
            blended[..., ys, xs] += tile * weight
            weights[ys, xs] += weight
    assert blended is not None
    assert weights is not None
    return blended.div_(weights)


def _starts(length: int, tile: int, factor: int) -> Sequence[int]:
    """Where tiles begin along a side, evenly spaced; the last one ends with the side."""
    if tile >= length:
        return [0]
    count = -(-(length - OVERLAP) // (tile - OVERLAP))
    last = length - tile
    return [round(i * last / (count - 1) / factor) * factor for i in range(count)]


def _fade(start: int, length: int, total: int, unit: int) -> torch.Tensor:
    """Weights along a side of a tile, which rise and fall where it has neighbours."""
    positions = torch.arange(length) + 0.5
    overlap = OVERLAP / unit
    weights = torch.ones(length)
    if start > 0:
        weights = torch.minimum(weights, positions / overlap)
    if start + length < total:
        weights = torch.minimum(weights, (length - positions) / overlap)
    return weights
