"""The pictures that train the ``tiny`` autoencoder: photographs, photographs in other colours, and drawings.

Photographs alone are not enough. They contain hardly any saturated magenta, cyan or green, and a network without
normalisation does anything on colours it has never seen. So a part of each batch is recoloured or drawn at random. All of
it is made on the device in whole batches: one training step on a GPU takes milliseconds. Pixels are floats in -1 … 1.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch.nn.functional import affine_grid, grid_sample, interpolate

NUM_SHAPES = 8
NUM_TEXT_PAGES = 64
TEXT_PAGE_SIDE = 512


class Pictures:
    """Random square pictures [B,3,side,side] from a seed."""

    def __init__(self, photos: list[torch.Tensor], side: int, device: torch.device, seed: int) -> None:
        self._side, self._device = side, device
        self._random = torch.Generator(device).manual_seed(seed)
        self._cpu_random = torch.Generator().manual_seed(seed)
        levels = _levels(photos, side, device)
        # All levels in one tensor, so that one indexing operation takes the crops of a whole batch.
        self._pixels = torch.cat([level.flatten() for level in levels])
        sizes = torch.tensor([level.shape[-2:] for level in levels], device=device)
        self._heights, self._widths = sizes.unbind(dim=1)
        ends = (3 * self._heights * self._widths).cumsum(0)
        self._starts = ends - 3 * self._heights * self._widths
        self._weights = (self._heights * self._widths).float().sqrt()
        self._pages = _text_pages(seed).to(device)
        self.num_levels = len(levels)

    def batch(self, num_photos: int, num_recoloured: int, num_drawn: int) -> torch.Tensor:
        """Photographs first, then recoloured photographs, then drawings, on average of each kind equally many."""
        photos = self.photos(num_photos + num_recoloured)
        parts = [photos[:num_photos], self.recolour(photos[num_photos:])]
        kinds: list[Callable[[int], torch.Tensor]] = [self.gradients, self.mosaics, self.shapes, self.text]
        first = self._choose(*range(len(kinds)))
        for i, draw in enumerate(kinds[first:] + kinds[:first]):
            if num := (num_drawn + i) // len(kinds):
                parts.append(draw(num))
        return torch.cat(parts)

    def photos(self, num: int) -> torch.Tensor:
        """Random crops of photographs, a half of them mirrored and a quarter transposed."""
        chosen = torch.multinomial(self._weights, num, replacement=True, generator=self._random)
        heights, widths = self._heights[chosen], self._widths[chosen]
        top = (self._uniform(num) * (heights - self._side + 1)).long()
        left = (self._uniform(num) * (widths - self._side + 1)).long()
        y = torch.arange(self._side, device=self._device)[None, :, None]
        x = torch.arange(self._side, device=self._device)[None, None, :]
        x = torch.where(_each(self._uniform(num) < 0.5), x, self._side - 1 - x)
        transposed = _each(self._uniform(num) < 0.25)
        y, x = torch.where(transposed, x, y), torch.where(transposed, y, x)
        inside = _each(self._starts[chosen]) + (y + _each(top)) * _each(widths) + x + _each(left)
        channels = (
            torch.arange(3, device=self._device)[None, :, None, None] * _each(heights * widths)[:, None]
        )
        return self._pixels[inside[:, None] + channels].float() / 127.5 - 1

    def recolour(self, photos: torch.Tensor) -> torch.Tensor:
        """Turn the hue, raise the saturation and invert channels; or map brightness to a line between two colours."""
        num = len(photos)
        grey = torch.full((3, 3), 1 / 3, device=self._device)
        angle = 2 * math.pi * self._uniform(num)
        saturation = 4 ** self._uniform(num)
        # A rotation about the grey axis, scaled away from it: grey + s (cos (1 - grey) + sin cross).
        cross = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]], device=self._device) / math.sqrt(3)
        colourful = torch.eye(3, device=self._device) - grey
        turned = _each(angle.cos()) * colourful + _each(angle.sin()) * cross
        signs = torch.where(self._uniform(num, 3) < 0.2, -1.0, 1.0)
        matrix = signs[:, :, None] * (grey + _each(saturation) * turned)
        first, second = self._colours(num), self._colours(num)
        two_colours = _each(self._uniform(num) < 0.25)
        line = (second - first)[:, :, None] / 2 * torch.full((1, 3), 1 / 3, device=self._device)
        matrix = torch.where(two_colours, line, matrix)
        offset = torch.where(two_colours[:, 0], (first + second) / 2, 0.0)
        mapped = torch.einsum("bij,bjhw->bihw", matrix, photos) + offset[:, :, None, None]
        return mapped.clamp(-1, 1)

    def gradients(self, num: int) -> torch.Tensor:
        """Flat colours (a third), or a few colours that blend smoothly into each other."""
        coarse = self._colours(num, self._choose(2, 3, 5), self._choose(2, 3, 5))
        blended = interpolate(coarse, size=(self._side, self._side), mode="bilinear", align_corners=True)
        flat = self._colours(num)[:, :, None, None].expand_as(blended)
        return torch.where(_each(self._uniform(num) < 1 / 3)[:, None], flat, blended)

    def mosaics(self, num: int) -> torch.Tensor:
        """Checkerboards (a half) and random tiles, of any colours and with tiles of one size in a batch."""
        cell = self._choose(2, 4, 8, 12, 16, 24, 32, 48, 64)
        cells = self._side // cell + 2
        tiles = self._colours(num, cells, cells)
        index = torch.arange(cells, device=self._device)
        odd = (index[:, None] + index[None, :]) % 2 == 1
        pair = self._colours(2 * num)[:, :, None, None]
        board = torch.where(odd, pair[:num], pair[num:])
        picture = torch.where(_each(self._uniform(num) < 0.5)[:, None], board, tiles)
        picture = picture.repeat_interleave(cell, dim=2).repeat_interleave(cell, dim=3)
        top, left = self._choose(*range(cell)), self._choose(*range(cell))
        return picture[:, :, top : top + self._side, left : left + self._side]

    def shapes(self, num: int) -> torch.Tensor:
        """Rectangles, ellipses and outlines of one colour each, on a gradient."""
        picture = self.gradients(num)
        axis = torch.arange(self._side, device=self._device, dtype=torch.float32)
        for _ in range(NUM_SHAPES):
            x0, y0 = self._side * _each(self._uniform(num)), self._side * _each(self._uniform(num))
            x, y = axis[None, None, :] - x0, axis[None, :, None] - y0
            angle = math.pi * _each(self._uniform(num))
            x, y = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
            width, height = (_each(2 * 64 ** self._uniform(num)) for _ in range(2))
            u, v = x.abs() / width, y.abs() / height
            round_ = _each(self._uniform(num) < 0.5)
            distance = torch.where(round_, (u * u + v * v).sqrt(), torch.maximum(u, v)) - 1
            distance = distance * torch.minimum(width, height)
            line_width = _each(0.5 + 6 * self._uniform(num))
            outlined = _each(self._uniform(num) < 0.3)
            distance = torch.where(outlined, distance.abs() - line_width, distance)
            cover = (0.5 - distance).clamp(0, 1)[:, None]
            picture = picture + cover * (self._colours(num)[:, :, None, None] - picture)
        return picture

    def text(self, num: int) -> torch.Tensor:
        """Lines of text in one colour on a gradient."""
        background = self.gradients(num)
        scale = self._side / TEXT_PAGE_SIDE * (0.5 + self._uniform(num))
        shift = (2 * self._uniform(num, 2) - 1) * (1 - scale[:, None])
        theta = torch.zeros(num, 2, 3, device=self._device)
        theta[:, 0, 0] = theta[:, 1, 1] = scale
        theta[:, :, 2] = shift
        pages = self._pages[
            torch.randint(len(self._pages), (num,), generator=self._random, device=self._device)
        ]
        grid = affine_grid(theta, [num, 1, self._side, self._side], align_corners=False)
        cover = grid_sample(pages, grid, align_corners=False)
        return background + cover * (self._colours(num)[:, :, None, None] - background)

    def _uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._random, device=self._device)

    def _choose(self, *values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=self._cpu_random))]

    def _colours(self, num: int, *size: int) -> torch.Tensor:
        """Colours [num,3,*size] over the whole cube. Of each channel, a third is fully on or off: edges and corners are common."""
        shape = (num, 3, *size)
        values = 2 * self._uniform(*shape) - 1
        return torch.where(self._uniform(*shape) < 1 / 3, values.sign(), values)


def _each(values: torch.Tensor) -> torch.Tensor:
    """One value per picture, to combine with [B,H,W]."""
    return values[:, None, None]


def _levels(photos: list[torch.Tensor], side: int, device: torch.device) -> list[torch.Tensor]:
    """Each photograph uint8 [3,H,W] at several scales, as long as a crop fits."""
    levels = []
    for photo in photos:
        level = photo.to(device)
        while min(level.shape[-2:]) >= side:
            levels.append(level)
            size = [round(edge * 0.6) for edge in level.shape[-2:]]
            smaller = interpolate(level[None].float(), size=size, mode="bicubic", antialias=True)[0]
            level = smaller.round().clamp(0, 255).to(torch.uint8)
    return levels


def _text_pages(seed: int) -> torch.Tensor:
    """Pages [N,1,512,512] of random words in random sizes: 1 is ink."""
    random = np.random.default_rng(seed)
    letters = list(string.ascii_letters + string.digits + "&%$#@!?.,")
    pages = []
    for _ in range(NUM_TEXT_PAGES):
        page = Image.new("L", (TEXT_PAGE_SIDE, TEXT_PAGE_SIDE))
        draw, top = ImageDraw.Draw(page), 0
        while top < TEXT_PAGE_SIDE:
            size = int(10 * 16 ** random.random())
            line = " ".join("".join(random.choice(letters, random.integers(1, 9))) for _ in range(20))
            draw.text((4, top), line, fill=255, font=ImageFont.load_default(size))
            top += round(size * 1.2)
        pages.append(torch.from_numpy(np.array(page)))
    return torch.stack(pages)[:, None].float() / 255
