"""Whether a latent is fit to be trained on, and how close it comes to what it was made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def latent_flags(latents: torch.Tensor) -> torch.Tensor:
    """For each latent whether it holds NaN or infinite values, and whether it is constant."""
    values = latents.flatten(1).float()
    infinite = ~torch.isfinite(values).all(dim=1)
    constant = values.amin(dim=1) == values.amax(dim=1)
    return torch.stack([infinite, constant & (values.shape[1] > 1)], dim=1)


def problem_of_flags(flags: Sequence[bool], latent: torch.Tensor) -> str | None:
    infinite, constant = flags
    if infinite:
        return "its latent holds NaN or infinite values; try --dtype float32"
    if constant:
        return f"its latent is constant ({latent.flatten()[0].item():g} everywhere)"
    return None


def latent_problem(latent: torch.Tensor) -> str | None:
    """Why no one should train on this latent, if so."""
    return problem_of_flags(latent_flags(latent[None])[0].tolist(), latent)


def psnr_db(original: torch.Tensor, restored: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of two uint8 pictures or clips, in decibels; 99 at most. Computed where the second is."""
    error = (original.to(restored.device).float() - restored.float()).square().mean().item()
    return min(99.0, 10 * math.log10(255**2 / error)) if error > 0 else 99.0
