"""Wan 2.1's causal video VAE, its encoder only.

diffusers encodes four frames at a time, with the last two frames before them kept by every layer. TemporalChunks of
any length, one frame first, give the same: here they are as long as fits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from latentry.processors.fused import ops
from latentry.processors.fused.causal import (
    FirstConv,
    FrameCache,
    TemporalChunks,
    conv2d,
    conv3d,
    fold_time,
    norm_factor,
    pointwise,
    with_channels_last,
)

_NARROW = 128
"""Convolutions of fewer channels go over folded frames."""


class WanEncoder:
    """``encoder(clips)`` is ``vae.encode(clips)``'s moments, for [B,3,T,H,W] in -1 … 1."""

    def __init__(self, vae: Any) -> None:
        self._encoder = vae.encoder
        self._quant_conv = vae.quant_conv
        widest = 3 * vae.encoder.conv_in.out_channels
        self._chunks = TemporalChunks(widest, step=4, value_bytes=vae.dtype.itemsize)
        self.bytes_needed = self._chunks.bytes_needed
        self._first = FirstConv(vae.encoder.conv_in)
        with_channels_last(vae.encoder)
        self._folded = {
            id(layer): fold_time(layer.weight)
            for layer in vae.encoder.modules()
            if isinstance(layer, torch.nn.Conv3d)
            and layer.kernel_size == (3, 3, 3)
            and layer.in_channels < _NARROW
        }

    @staticmethod
    def supports(vae: Any) -> bool:
        """Whether the VAE is built of what is known here; Wan 2.2's is not."""
        kinds = {type(block).__name__ for block in vae.encoder.down_blocks}
        return kinds <= {"WanResidualBlock", "WanResample"} and vae.config.patch_size is None

    def __call__(self, clips: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._encode(clip.permute(1, 2, 3, 0).contiguous()) for clip in clips])

    def _encode(self, clip: torch.Tensor) -> torch.Tensor:
        frame_cache = FrameCache()
        parts = [self._stretch(part, frame_cache) for part in self._chunks.of(clip)]
        return pointwise(torch.cat(parts), self._quant_conv).permute(3, 0, 1, 2)

    def _stretch(self, x: torch.Tensor, frame_cache: FrameCache) -> torch.Tensor:
        encoder = self._encoder
        before = frame_cache.get(encoder.conv_in)
        room = torch.cat([torch.zeros_like(x[:1]).expand(2, -1, -1, -1) if before is None else before, x])
        frame_cache.keep(encoder.conv_in, room[-2:])
        x = self._first(room, padding=1)
        for block in encoder.down_blocks:
            kind = type(block).__name__
            x = (
                self._residual(x, block, frame_cache)
                if kind == "WanResidualBlock"
                else _resample(x, block, frame_cache)
            )
        x = self._residual(x, encoder.mid_block.resnets[0], frame_cache)
        for attention, block in zip(encoder.mid_block.attentions, encoder.mid_block.resnets[1:], strict=True):
            x = self._residual(_attention(x, attention), block, frame_cache)
        return self._norm_conv(x, encoder.norm_out, None, encoder.conv_out, frame_cache).add_(
            encoder.conv_out.bias
        )

    def _residual(self, x: torch.Tensor, block: Any, frame_cache: FrameCache) -> torch.Tensor:
        h = self._norm_conv(x, block.norm1, None, block.conv1, frame_cache)
        h = self._norm_conv(h, block.norm2, block.conv1.bias, block.conv2, frame_cache)
        if not isinstance(block.conv_shortcut, torch.nn.Identity):
            x = pointwise(x, block.conv_shortcut)
        return ops.add_rows(x, h, block.conv2.bias)

    def _norm_conv(
        self, x: torch.Tensor, norm: Any, bias: torch.Tensor | None, conv: Any, frame_cache: FrameCache
    ) -> torch.Tensor:
        """The norm, the activation and the convolution after it, without its bias."""
        gamma = norm_factor(norm)
        before = frame_cache.get(conv)
        weight = self._folded.get(id(conv))
        if weight is None:
            room = x.new_empty(len(x) + 2, *x.shape[1:])
            ops.norm_rows(x, gamma, bias, out=room[2:])
            room[:2] = 0 if before is None else before
            frame_cache.keep(conv, room[-2:])
            return conv3d(room, conv, None, padding=(0, 1, 1))
        width = x.shape[-1]
        room = x.new_empty(*x.shape[:-1], 3 * width)
        ops.norm_rows(x, gamma, bias, fold=True, out=room)
        room[0, ..., :width] = 0 if before is None else before[0]
        room[0, ..., width : 2 * width] = 0 if before is None else before[1]
        if len(room) > 1:
            room[1, ..., :width] = 0 if before is None else before[1]
        frame_cache.keep(conv, torch.stack([room[-1, ..., width : 2 * width], room[-1, ..., 2 * width :]]))
        return conv2d(room, weight)


def _resample(x: torch.Tensor, block: Any, frame_cache: FrameCache) -> torch.Tensor:
    conv = block.resample[1]
    pictures = F.pad(x, (0, 0, 0, 1, 0, 1)).permute(0, 3, 1, 2)
    x = F.conv2d(pictures, conv.weight, conv.bias, conv.stride).permute(0, 2, 3, 1).contiguous()
    if block.mode == "downsample2d":
        return x
    before = frame_cache.get(block)
    frame_cache.keep(block, x[-1:])
    if before is not None:
        return conv3d(torch.cat([before, x]), block.time_conv, block.time_conv.bias)
    if len(x) == 1:
        return x
    return torch.cat([x[:1], conv3d(x, block.time_conv, block.time_conv.bias)])


def _attention(x: torch.Tensor, attention: Any) -> torch.Tensor:
    """Each frame attends to itself."""
    rows = ops.norm_rows(x, norm_factor(attention.norm), silu=False)
    query, key, value = pointwise(rows, attention.to_qkv).flatten(1, 2).chunk(3, dim=-1)
    mixed = torch.stack([ops.attend(*frame) for frame in zip(query, key, value, strict=True)])
    h = F.linear(mixed, attention.proj.weight.flatten(1)).view(x.shape)
    return ops.add_rows(x, h, attention.proj.bias)
