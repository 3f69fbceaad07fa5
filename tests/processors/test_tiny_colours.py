"""The embedded autoencoder restores saturated colours, which photographs hardly contain."""

from __future__ import annotations

import itertools

import pytest
import torch

from latentry.cache.latent_checks import psnr_db
from latentry.processors.tiny import TinyProcessor

SIDE = 128
SATURATED = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "cyan": (0, 255, 255),
    "magenta": (255, 0, 255),
}


@pytest.fixture(scope="module")
def tiny():
    return TinyProcessor("embedded", torch.device("cpu"), torch.float32)


def flat(colour: tuple[int, int, int]) -> torch.Tensor:
    """A picture of a single colour: uint8 [3,H,W]."""
    return torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, SIDE, SIDE)


def poorly_restored(tiny, pictures: dict, *, below_db: float) -> dict:
    """The pictures, named, whose PSNR after encoding and decoding is too low."""
    pixels = torch.stack(list(pictures.values()))
    restored = tiny.decode_latents(tiny.encode_pixels(pixels, None))
    values = [psnr_db(*pair) for pair in zip(pixels, restored, strict=True)]
    return {name: value for name, value in zip(pictures, values, strict=True) if value < below_db}


def test_tiny_restores_flat_colours_over_the_whole_rgb_cube(tiny):
    levels = (0, 64, 128, 191, 255)
    colours = [(r, g, b) for r in levels for g in levels for b in levels]
    assert poorly_restored(tiny, {colour: flat(colour) for colour in colours}, below_db=30) == {}


def test_tiny_restores_gradients_between_saturated_colours(tiny):
    position = torch.linspace(0, 1, SIDE)
    gradients = {
        (first, second): torch.lerp(flat(start).float(), flat(end).float(), position).round().to(torch.uint8)
        for (first, start), (second, end) in itertools.combinations(SATURATED.items(), 2)
    }
    assert poorly_restored(tiny, gradients, below_db=30) == {}


def test_tiny_restores_saturated_shapes_on_saturated_backgrounds(tiny):
    axis = torch.arange(SIDE) - SIDE / 2
    disc = axis[:, None].square() + axis.square() < 32**2
    shapes = {
        (inside, outside): torch.where(disc, flat(SATURATED[inside]), flat(SATURATED[outside]))
        for inside, outside in itertools.permutations(SATURATED, 2)
    }
    assert poorly_restored(tiny, shapes, below_db=20) == {}
