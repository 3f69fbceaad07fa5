"""Checks of latents: whether they are fit for training, and how well they restore their input."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def latent_flags(latents: torch.Tensor) -> torch.Tensor:
    """Two flags per latent, as bool [B,2]: it holds NaN or infinite values; it is constant.

    The flags stay on the latents' device, so a GPU does not have to finish before this returns.
    """
    values = latents.flatten(1).float()
    not_finite = ~torch.isfinite(values).all(dim=1)
    constant = values.amin(dim=1) == values.amax(dim=1)
    return torch.stack([not_finite, constant & (values.shape[1] > 1)], dim=1)


def problem_of_flags(flags: Sequence[bool], latent: torch.Tensor) -> str | None:
    """Describe the problem that one row of ``latent_flags`` reports, or return None."""
    not_finite, constant = flags
    if not_finite:
        return "has a latent with NaN or infinite values; try --dtype float32"
    if constant:
        return f"has a constant latent ({latent.flatten()[0].item():g} everywhere)"
    return None


def latent_problem(latent: torch.Tensor) -> str | None:
    """Describe why one latent is unfit for training, or return None."""
    return problem_of_flags(latent_flags(latent[None])[0].tolist(), latent)


def psnr_db(original: torch.Tensor, restored: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of two uint8 images or clips, in decibels, at most 99.

    The computation runs on the device of ``restored``.
    """
    error = (original.to(restored.device).float() - restored.float()).square().mean().item()
    return min(99.0, 10 * math.log10(255**2 / error)) if error > 0 else 99.0
