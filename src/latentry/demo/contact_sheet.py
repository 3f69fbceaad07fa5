"""A picture of what latents hold: every original beside its latent, decoded again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from latentry.cache.format import read_metadata
from latentry.media.images import decode_image, fit_to_bucket
from latentry.processors import Processor, processor_class
from latentry.serve.dataset import TextToImageDataset, TextToVideoDataset

_TILE, _GAP, _LABEL_HEIGHT, _NUM_COLUMNS = 220, 8, 18, 3
_FONT_SIZE = 12


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two pictures, uint8 [3,H,W], and what to write under them."""

    label: str
    left: torch.Tensor
    right: torch.Tensor


def draw_contact_sheet(output_file: Path, image_cache: Path, clip_cache: Path | None = None) -> int:
    """Draw originals beside their decoded latents: ``draw_contact_sheet(Path("sheet.png"), Path("cache"))``.

    Args:
        output_file: The picture to write; its suffix decides the format.
        image_cache: A cache of images whose inputs still exist.
        clip_cache: A cache of clips, for their first and last frames.

    Returns:
        The number of pairs.
    """
    pairs = [*_image_pairs(image_cache), *(_clip_pairs(clip_cache) if clip_cache else ())]
    width, height = 2 * _TILE + 3 * _GAP, _TILE + _LABEL_HEIGHT + 2 * _GAP
    num_rows = -(-len(pairs) // _NUM_COLUMNS)
    sheet = Image.new("RGB", (_NUM_COLUMNS * width, num_rows * height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_FONT_SIZE)
    for number, pair in enumerate(pairs):
        left, top = (number % _NUM_COLUMNS) * width + _GAP, (number // _NUM_COLUMNS) * height + _GAP
        sheet.paste(_tile(pair.left), (left, top))
        sheet.paste(_tile(pair.right), (left + _TILE + _GAP, top))
        label = _shortened(pair.label, font, 2 * _TILE + _GAP)
        draw.text((left, top + _TILE + 2), label, fill="black", font=font)
    sheet.save(output_file)
    return len(pairs)


def _image_pairs(cache: Path) -> Iterator[_Pair]:
    """Every image as it was cut to its bucket, and its latent decoded."""
    processor = _processor_of(cache)
    dataset = TextToImageDataset(cache)
    for item in map(dataset.__getitem__, range(len(dataset))):
        width, height = item["crop_resolution"].tolist()
        pixels = decode_image(Path(item["image_path"]).read_bytes()).pixels
        original, _ = fit_to_bucket(pixels, (width, height))
        decoded = processor.decode_latents(item["latent"][None])[0]
        yield _Pair(f"{width}x{height}  {item['prompt']}", original, decoded)


def _clip_pairs(cache: Path) -> Iterator[_Pair]:
    """The first frame of every clip and its latent decoded; then the decoded first and last frames."""
    processor = _processor_of(cache)
    dataset = TextToVideoDataset(cache, model_type=processor.info.model_type)
    for number in range(len(dataset)):
        data = dataset.samples.load(number)
        decoded = processor.decode_latents(data["video_latents"])[0]  # [3,T,H,W]
        first_frame = data["first_frame"].permute(2, 0, 1)
        yield _Pair(f"first frame  {data['prompt']}", first_frame, decoded[:, 0])
        yield _Pair(f"frames 1 and {decoded.shape[1]}, both decoded", decoded[:, 0], decoded[:, -1])


def _processor_of(cache: Path) -> Processor:
    """The model that made the cache, on the CPU."""
    metadata = read_metadata(cache)
    family = processor_class(metadata.processor or "")
    return family(metadata.model_name or "", torch.device("cpu"), torch.float32)


def _tile(pixels: torch.Tensor) -> Image.Image:
    """A picture scaled to fit a square tile, at its bottom, next to the label."""
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    picture.thumbnail((_TILE, _TILE))
    tile = Image.new("RGB", (_TILE, _TILE), "white")
    tile.paste(picture, ((_TILE - picture.width) // 2, _TILE - picture.height))
    return tile


def _shortened(label: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """As much of the label as fits, with an ellipsis where it is cut."""
    if font.getlength(label) <= width:
        return label
    while label and font.getlength(f"{label}…") > width:
        label = label[:-1]
    return f"{label}…"
