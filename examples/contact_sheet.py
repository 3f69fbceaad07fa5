"""Originals beside their decoded latents: ``python examples/contact_sheet.py CACHE SHEET.png [CLIP_CACHE]``."""

import sys
from pathlib import Path

from latentry.demo.contact_sheet import draw_contact_sheet

image_cache, sheet, *clip_cache = map(Path, sys.argv[1:])
num_pairs = draw_contact_sheet(sheet, image_cache, *clip_cache)
print(f"{sheet}: {num_pairs} pairs, the original on the left, its decoded latent on the right")
