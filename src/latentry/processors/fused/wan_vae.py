"""The encoder of Wan 2.1's causal video VAE.

diffusers encodes four frames at a time, and every layer keeps the last two frames before them. Chunks of any multiple
of four frames, after a first frame, give the same numbers. Here they are as long as the memory allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from latentry.processors.fused import ops
from latentry.processors.fused.causal import (
    RMS_NORM_2D,
    RMS_NORM_3D,
    CausalEncoder,
    FrameCache,
    TemporalChunks,
    conv2d,
    conv3d,
    fold_time,
    norm_factor,
    pointwise,
)
from latentry.processors.fused.structure import (
    DROPOUT,
    SILU,
    Absent,
    Anything,
    Described,
    Each,
    OneOf,
    conv,
    matches,
)

_NARROW = 128
"""Convolutions of fewer channels run in 2D over the channels of three frames."""

_CAUSAL_CONV = conv(3, 3, stride=(1, 1, 1))
_POINTWISE_CONV = conv(3, 1, stride=(1, 1, 1))
_RESIDUAL = Described(
    children={
        "norm1": RMS_NORM_3D,
        "conv1": _CAUSAL_CONV,
        "norm2": RMS_NORM_3D,
        "dropout": DROPOUT,
        "conv2": _CAUSAL_CONV,
        "nonlinearity": SILU,
        "conv_shortcut": OneOf(Described(nn.Identity), _POINTWISE_CONV),
    }
)
_DOWNSAMPLE = Described(
    children={
        "resample": Described(
            children={
                "0": Described(nn.ZeroPad2d, padding=(0, 1, 0, 1)),
                "1": conv(2, 3, stride=(2, 2), padding=(0, 0)),
            }
        ),
        "time_conv": OneOf(Absent(), conv(3, (3, 1, 1), stride=(2, 1, 1))),
    }
)
_ATTENTION = Described(
    children={
        "norm": RMS_NORM_2D,
        "to_qkv": conv(2, 1, stride=(1, 1)),
        "proj": conv(2, 1, stride=(1, 1)),
    }
)
_STRUCTURE = Described(
    children={
        "encoder": Described(
            children={
                "conv_in": _CAUSAL_CONV,
                "down_blocks": Each(OneOf(_RESIDUAL, _DOWNSAMPLE)),
                "mid_block": Described(children={"resnets": Each(_RESIDUAL), "attentions": Each(_ATTENTION)}),
                "norm_out": RMS_NORM_3D,
                "nonlinearity": SILU,
                "conv_out": _CAUSAL_CONV,
            }
        ),
        "quant_conv": _POINTWISE_CONV,
        "decoder": Anything(),
        "post_quant_conv": Anything(),
    }
)


class WanEncoder(CausalEncoder):
    """``encoder(clips)`` is ``vae.encode(clips)``'s moments, for [B,3,T,H,W] in -1 … 1."""

    name: ClassVar[str] = "Wan VAE"
    check_size = (40, 56)

    def __init__(self, vae: Any) -> None:
        conv_in = vae.encoder.conv_in
        # 10.0 GB for 81 frames of 832x480 in chunks of 16, and 4.4 GB in chunks of 4, on an H200.
        chunks = TemporalChunks(3 * conv_in.out_channels, 4, vae.dtype.itemsize, live=2.1, kept=8)
        super().__init__(vae, conv_in, chunks)
        self._quant_conv = vae.quant_conv
        self._folded = {
            id(layer): fold_time(layer.weight)
            for layer in vae.encoder.modules()
            if isinstance(layer, nn.Conv3d) and layer.kernel_size == (3, 3, 3) and layer.in_channels < _NARROW
        }

    @staticmethod
    def supports(vae: Any) -> bool:
        """Whether this is Wan 2.1's VAE. Wan 2.2's has other blocks, and cuts frames into patches."""
        return matches(vae, _STRUCTURE) and getattr(vae.config, "patch_size", None) is None

    def _encode(self, chunks: Iterator[torch.Tensor]) -> torch.Tensor:
        frame_cache = FrameCache()
        parts = [self._encode_chunk(chunk, frame_cache) for chunk in chunks]
        return pointwise(torch.cat(parts), self._quant_conv).permute(3, 0, 1, 2)

    def _encode_chunk(self, x: torch.Tensor, frame_cache: FrameCache) -> torch.Tensor:
        encoder = self._encoder
        before = frame_cache.get(encoder.conv_in)
        padded = torch.cat([torch.zeros_like(x[:1]).expand(2, -1, -1, -1) if before is None else before, x])
        frame_cache.put(encoder.conv_in, padded[-2:])
        x = self._first(padded, padding=1)
        for block in encoder.down_blocks:
            if hasattr(block, "resample"):
                x = _downsample(x, block, frame_cache)
            else:
                x = self._residual(x, block, frame_cache)
        x = self._residual(x, encoder.mid_block.resnets[0], frame_cache)
        for attention, block in zip(encoder.mid_block.attentions, encoder.mid_block.resnets[1:], strict=True):
            x = self._residual(_attention(x, attention), block, frame_cache)
        return self._norm_conv(x, encoder.norm_out, None, encoder.conv_out, frame_cache).add_(
            encoder.conv_out.bias
        )

    def _residual(self, x: torch.Tensor, block: Any, frame_cache: FrameCache) -> torch.Tensor:
        h = self._norm_conv(x, block.norm1, None, block.conv1, frame_cache)
        h = self._norm_conv(h, block.norm2, block.conv1.bias, block.conv2, frame_cache)
        if not isinstance(block.conv_shortcut, nn.Identity):
            x = pointwise(x, block.conv_shortcut)
        return ops.add_rows(x, h, block.conv2.bias)

    def _norm_conv(
        self, x: torch.Tensor, norm: Any, bias: torch.Tensor | None, conv: Any, frame_cache: FrameCache
    ) -> torch.Tensor:
        """Norm, activation, and the convolution after them without its bias."""
        gamma = norm_factor(norm)
        before = frame_cache.get(conv)
        weight = self._folded.get(id(conv))
        if weight is None:
            padded = x.new_empty(len(x) + 2, *x.shape[1:])
            ops.norm_rows(x, gamma, bias, out=padded[2:])
            padded[:2] = 0 if before is None else before
            frame_cache.put(conv, padded[-2:])
            return conv3d(padded, conv, None, padding=(0, 1, 1))
        width = x.shape[-1]
        folded = x.new_empty(*x.shape[:-1], 3 * width)
        ops.norm_rows(x, gamma, bias, fold=True, out=folded)
        folded[0, ..., :width] = 0 if before is None else before[0]
        folded[0, ..., width : 2 * width] = 0 if before is None else before[1]
        if len(folded) > 1:
            folded[1, ..., :width] = 0 if before is None else before[1]
        frame_cache.put(conv, torch.stack([folded[-1, ..., width : 2 * width], folded[-1, ..., 2 * width :]]))
        return conv2d(folded, weight)


def _downsample(x: torch.Tensor, block: Any, frame_cache: FrameCache) -> torch.Tensor:
    conv = block.resample[1]
    padded = F.pad(x, (0, 0, 0, 1, 0, 1)).permute(0, 3, 1, 2)
    x = F.conv2d(padded, conv.weight, conv.bias, conv.stride).permute(0, 2, 3, 1).contiguous()
    time_conv = getattr(block, "time_conv", None)
    if time_conv is None:
        return x
    before = frame_cache.get(block)
    frame_cache.put(block, x[-1:])
    if before is not None:
        return conv3d(torch.cat([before, x]), time_conv, time_conv.bias)
    if len(x) == 1:
        return x
    return torch.cat([x[:1], conv3d(x, time_conv, time_conv.bias)])


def _attention(x: torch.Tensor, attention: Any) -> torch.Tensor:
    """Each frame attends to itself."""
    rows = ops.norm_rows(x, norm_factor(attention.norm), silu=False)
    query, key, value = pointwise(rows, attention.to_qkv).flatten(1, 2).chunk(3, dim=-1)
    mixed = torch.stack([ops.attend(*frame) for frame in zip(query, key, value, strict=True)])
    h = F.linear(mixed, attention.proj.weight.flatten(1)).view(x.shape)
    return ops.add_rows(x, h, attention.proj.bias)
