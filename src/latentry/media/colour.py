"""Any Pillow image as 8-bit sRGB on white."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageCms


def to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert any mode to RGB: apply the profile, then flatten transparency onto white.

    Args:
        image: The image.
        profile: Its ICC profile; None for sRGB.
    """
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        transparent_value = image.info.get("transparency")
        opacity = None
        if isinstance(transparent_value, int):
            opacity = np.where(np.asarray(image) == transparent_value, 0, 255).astype(np.uint8)
        image = _to_eight_bits(image)
        if opacity is not None:
            image = Image.merge("LA", [image, Image.fromarray(opacity)])
    if image.mode in ("P", "PA") or (image.mode in ("1", "L", "RGB") and "transparency" in image.info):
        image = image.convert("RGBA")
    alpha = image.getchannel("A") if image.mode in ("LA", "La", "RGBA", "RGBa") else None
    if image.mode in ("La", "RGBa"):
        image = image.convert(image.mode.upper())
    if alpha is not None:
        image = image.convert("RGB" if image.mode == "RGBA" else "L")
    if profile:
        image = apply_profile(image, profile)
    image = image.convert("RGB")
    if alpha is not None:
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=alpha)
        return white
    return image


def apply_profile(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert from an ICC profile to sRGB. An unusable profile is ignored, as viewers do."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        converted = ImageCms.profileToProfile(
            image,
            source,
            ImageCms.createProfile("sRGB"),
            outputMode="RGB",
            renderingIntent=ImageCms.Intent.PERCEPTUAL,
        )
    except (ImageCms.PyCMSError, OSError):
        return image
    return image if converted is None else converted


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Map 16-bit values, 32-bit integers and floats to 0..255. Floats may range to 1, to 255 or to 65535."""
    values = np.asarray(image).astype(np.float64)
    if image.mode != "F" or values.max(initial=0) > 1:
        values = values / (65535 if image.mode != "F" or values.max(initial=0) > 255 else 255)
    return Image.fromarray((values.clip(0, 1) * 255 + 0.5).astype(np.uint8))
