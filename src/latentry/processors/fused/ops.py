"""The operations between two matrix products, each in one pass over memory.

Tensors are contiguous, with their channels last. On a GPU with Triton these functions call kernels. Elsewhere they run
the torch code below, which also defines what the kernels compute.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch.nn import functional as F


@functools.cache
def _triton() -> ModuleType | None:
    try:
        from latentry.processors.fused import triton_kernels
    except ImportError:
        return None
    return triton_kernels


def _kernels(x: torch.Tensor) -> ModuleType | None:
    return _triton() if x.is_cuda else None


def norm_rows(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = True,
    pad: int = 0,
    fold: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``silu(normalize(x + bias) * gamma)`` along the channels of [T,H,W,C].

    Args:
        x: The frames.
        gamma: The weights of the RMS norm times its constant factor. None skips the norm.
        bias: The bias of the convolution before. None if there is none.
        silu: Whether to apply the activation.
        pad: How often to repeat the edges of each frame.
        fold: Write three frames into each frame of ``out`` [T,H,W,3·C]: the second before it, the one before it, and
            itself. Values that would come from before the first frame are not written.
        out: Where to write. A new tensor if None.
    """
    if out is None:
        frames, height, width, channels = x.shape
        out = x.new_empty(frames, height + 2 * pad, width + 2 * pad, channels)
    if (kernels := _kernels(x)) is not None:
        return kernels.norm_rows(x, gamma, bias, out, silu=silu, pad=pad, fold=fold)  # type: ignore[no-any-return]
    value = x.float()
    if bias is not None:
        value = value + bias.float()
    if gamma is not None:
        value = F.normalize(value, dim=-1) * gamma.float()
    if silu:
        value = F.silu(value)
    if pad:
        value = F.pad(value.movedim(-1, 0), (pad, pad, pad, pad), mode="replicate").movedim(0, -1)
    if fold:
        channels = x.shape[-1]
        for tap in range(min(3, len(x))):
            out[tap:, ..., (2 - tap) * channels : (3 - tap) * channels] = value[: len(x) - tap]
        return out
    return out.copy_(value)


def add_rows(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``x + y + bias``. The result overwrites ``y``."""
    if (kernels := _kernels(x)) is not None:
        return kernels.add_rows(x, y, bias, y)  # type: ignore[no-any-return]
    return y.copy_(x.float() + y.float() + bias.float())


def group_norm(
    x: torch.Tensor, norm: torch.nn.GroupNorm, bias: torch.Tensor | None = None, *, silu: bool = True
) -> torch.Tensor:
    """``silu(norm(x + bias))`` of [B,…,C], computed from each channel's sum and sum of squares."""
    kernels = _kernels(x)
    batch, channels = x.shape[0], x.shape[-1]
    count = x.numel() // (batch * channels)
    flat = x.view(batch, count, channels)
    if kernels is not None:
        sums = kernels.channel_sums(flat)
    else:
        values = flat.float()
        sums = torch.stack([values.sum(1), values.square().sum(1)], dim=1)
    total, squares = sums.double().unbind(1)
    offset = torch.zeros(channels, device=x.device) if bias is None else bias
    offset = offset.double()
    squares = squares + 2 * offset * total + count * offset.square()
    total = total + count * offset
    size = count * channels // norm.num_groups
    grouped = (batch, norm.num_groups, -1)
    mean = total.view(grouped).sum(-1) / size
    variance = squares.view(grouped).sum(-1) / size - mean.square()
    deviation = torch.rsqrt(variance.clamp(min=0) + norm.eps)
    scale = deviation.repeat_interleave(channels // norm.num_groups, dim=1) * norm.weight.double()
    shift = norm.bias.double() + scale * (offset - mean.repeat_interleave(channels // norm.num_groups, dim=1))
    scale, shift = scale.float(), shift.float()
    out = torch.empty_like(x)
    if kernels is not None:
        return kernels.scale_rows(x, scale, shift, out, silu=silu)  # type: ignore[no-any-return]
    value = flat.float() * scale[:, None] + shift[:, None]
    return out.copy_((F.silu(value) if silu else value).view(x.shape))


def add_group_mean(h: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``h + bias`` plus the mean of a group of neighbouring channels of ``x``.

    ``x`` has a multiple of the channels of ``h``; the multiple is the size of a group.
    """
    group = x.shape[-1] // h.shape[-1]
    if (kernels := _kernels(x)) is not None:
        return kernels.add_group_mean(h, bias, x, torch.empty_like(h), group)  # type: ignore[no-any-return]
    mean = x.float().view(*h.shape, group).mean(-1)
    return (h.float() + bias.float() + mean).to(h.dtype)


def gelu_gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``gelu(a) * b``, with the tanh form of gelu. The result overwrites ``a``."""
    if (kernels := _kernels(a)) is not None:
        return kernels.gelu_gate(a, b, a)  # type: ignore[no-any-return]
    return a.copy_(F.gelu(a.float(), approximate="tanh") * b.float())


_MAX_SCORES = 1 << 28
"""How many scores are in memory at once; queries are split accordingly."""
_MAX_SOFTMAX = 1 << 17
"""The longest row that the softmax kernel takes."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention with one wide head: a query [L,D], and key and value [M,D], give [L,D].

    Flash attention kernels stop at 256 channels, and these VAEs have up to 1024. Plain matrix products with float32
    scores between them are several times faster than the general attention kernel.
    """
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query[None, None], key[None, None], value[None, None])[0, 0]
    kernels = _triton()
    scale = query.shape[-1] ** -0.5
    parts = []
    for part in torch.split(query, max(1, _MAX_SCORES // len(key))):
        if part.dtype == torch.float32:
            scores = part @ key.T
        else:
            scores = torch.mm(part, key.T, out_dtype=torch.float32)
        if kernels is not None and len(key) <= _MAX_SOFTMAX:
            weights = kernels.softmax_rows(scores, scale, torch.empty_like(scores, dtype=query.dtype))
        else:
            weights = torch.softmax(scores.mul_(scale), dim=-1).to(query.dtype)
        parts.append(weights @ value)
    return torch.cat(parts)
