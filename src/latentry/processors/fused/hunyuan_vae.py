"""The encoder of HunyuanVideo 1.5's causal video VAE.

Everything before the attention in the middle is causal convolutions, and runs in temporal chunks. The attention sees its
own frame and all frames before it. Computed frame by frame it needs no mask, half of the arithmetic, and none of the
tens of gigabytes that the scores of all pairs take.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from latentry.processors.fused import ops
from latentry.processors.fused.causal import (
    RMS_NORM_3D,
    CausalEncoder,
    FrameCache,
    TemporalChunks,
    conv3d,
    norm_factor,
    pointwise,
)
from latentry.processors.fused.structure import SILU, Absent, Anything, Described, Each, OneOf, conv, matches

_POINTWISE_CONV = conv(3, 1, stride=(1, 1, 1))
_CAUSAL_CONV = Described(
    children={"conv": conv(3, 3, stride=(1, 1, 1), padding=(0, 0, 0))},
    pad_mode="replicate",
    time_causal_padding=(1, 1, 1, 1, 2, 0),
)
_RESNET = Described(
    children={
        "norm1": RMS_NORM_3D,
        "conv1": _CAUSAL_CONV,
        "norm2": RMS_NORM_3D,
        "conv2": _CAUSAL_CONV,
        "nonlinearity": SILU,
        "conv_shortcut": OneOf(Absent(), _POINTWISE_CONV),
    }
)
_DOWN_BLOCK = Described(
    children={
        "resnets": Each(_RESNET),
        "downsamplers": OneOf(Absent(), Each(Described(children={"conv": _CAUSAL_CONV}))),
    }
)
_ATTENTION = Described(
    children={
        "norm": RMS_NORM_3D,
        "to_q": _POINTWISE_CONV,
        "to_k": _POINTWISE_CONV,
        "to_v": _POINTWISE_CONV,
        "proj_out": _POINTWISE_CONV,
    }
)
_STRUCTURE = Described(
    children={
        "encoder": Described(
            children={
                "conv_in": _CAUSAL_CONV,
                "down_blocks": Each(_DOWN_BLOCK),
                "mid_block": Described(children={"resnets": Each(_RESNET), "attentions": Each(_ATTENTION)}),
                "norm_out": RMS_NORM_3D,
                "conv_act": SILU,
                "conv_out": _CAUSAL_CONV,
            }
        ),
        "decoder": Anything(),
    }
)


class HunyuanEncoder(CausalEncoder):
    """``encoder(clips)`` is ``vae.encode(clips)``'s moments, for [B,3,T,H,W] in -1 … 1."""

    name: ClassVar[str] = "HunyuanVideo VAE"
    check_size = (48, 80)

    def __init__(self, vae: Any) -> None:
        conv_in = vae.encoder.conv_in.conv
        step = vae.temporal_compression_ratio
        # 14.2 GB for 121 frames of 848x480 in chunks of 20, and 6.3 GB in chunks of 4, on an H200.
        chunks = TemporalChunks(2 * conv_in.out_channels, step, vae.dtype.itemsize, live=2.6, kept=15)
        super().__init__(vae, conv_in, chunks)

    @staticmethod
    def supports(vae: Any) -> bool:
        """Whether this is HunyuanVideo 1.5's VAE, and its shortcuts average groups that the kernels can take."""
        if not matches(vae, _STRUCTURE):
            return False
        shortcuts = [
            (down.group_size, 2, down.conv.conv)
            for block in vae.encoder.down_blocks
            for down in block.downsamplers or ()
        ]
        shortcuts.append((vae.encoder.group_size, 1, vae.encoder.conv_out.conv))
        return all(
            group >= least and group.bit_count() == 1 and conv.in_channels == group * conv.out_channels
            for group, least, conv in shortcuts
        )

    def _encode(self, chunks: Iterator[torch.Tensor]) -> torch.Tensor:
        encoder, frame_cache = self._encoder, FrameCache()
        x = torch.cat([self._encode_chunk(chunk, frame_cache) for chunk in chunks])
        frame_cache = FrameCache()
        x = _residual(x, encoder.mid_block.resnets[0], frame_cache)
        for attention, block in zip(encoder.mid_block.attentions, encoder.mid_block.resnets[1:], strict=True):
            x = _residual(_attention(x, attention), block, frame_cache)
        conv = encoder.conv_out.conv
        h = conv3d(_padded(x, encoder.norm_out, None, encoder.conv_out, frame_cache), conv, None)
        return ops.add_group_mean(h, conv.bias, x).permute(3, 0, 1, 2)

    def _encode_chunk(self, x: torch.Tensor, frame_cache: FrameCache) -> torch.Tensor:
        conv_in = self._encoder.conv_in
        x = self._first(_padded(x, None, None, conv_in, frame_cache, silu=False), padding=0)
        for block in self._encoder.down_blocks:
            for resnet in block.resnets:
                x = _residual(x, resnet, frame_cache)
            for downsampler in block.downsamplers or ():
                x = _downsample(x, downsampler, frame_cache)
        return x


def _padded(
    x: torch.Tensor,
    norm: Any,
    bias: torch.Tensor | None,
    conv: Any,
    frame_cache: FrameCache,
    *,
    silu: bool = True,
) -> torch.Tensor:
    """Norm and activation, with the edges of each frame repeated and the last two frames of the chunk before in front."""
    frames, height, width, channels = x.shape
    padded = x.new_empty(frames + 2, height + 2, width + 2, channels)
    gamma = None if norm is None else norm_factor(norm)
    ops.norm_rows(x, gamma, bias, silu=silu, pad=1, out=padded[2:])
    before = frame_cache.get(conv)
    padded[:2] = padded[2:3] if before is None else before
    frame_cache.put(conv, padded[-2:])
    return padded


def _residual(x: torch.Tensor, block: Any, frame_cache: FrameCache) -> torch.Tensor:
    h = conv3d(_padded(x, block.norm1, None, block.conv1, frame_cache), block.conv1.conv, None)
    h = conv3d(
        _padded(h, block.norm2, block.conv1.conv.bias, block.conv2, frame_cache), block.conv2.conv, None
    )
    if block.conv_shortcut is not None:
        x = pointwise(x, block.conv_shortcut)
    return ops.add_rows(x, h, block.conv2.conv.bias)


def _downsample(x: torch.Tensor, down: Any, frame_cache: FrameCache) -> torch.Tensor:
    """Fold space, and time if the layer does, into channels; add a shortcut of averaged channels to the convolution.

    The shortcut averages neighbouring channels before folding. The result is the same as after folding, for a quarter
    or an eighth of the data.
    """
    conv = down.conv.conv
    is_first_chunk = frame_cache.get(down.conv) is None
    h = conv3d(_padded(x, None, None, down.conv, frame_cache, silu=False), conv, None)
    if not down.add_temporal_downsample:
        return _fold(ops.add_group_mean(h, conv.bias, x), 1)
    if not is_first_chunk:
        return _fold(ops.add_group_mean(h, conv.bias, x), 2)
    # The first frame is folded alone: it counts twice, and its shortcut averages half as many channels.
    first = _fold(h[:1] + conv.bias, 1).repeat(1, 1, 1, 2)
    half = down.group_size // 2
    first = first + _fold(x[:1].view(*x[:1].shape[:-1], -1, half).float().mean(-1).to(x.dtype), 1)
    if len(x) == 1:
        return first
    return torch.cat([first, _fold(ops.add_group_mean(h[1:], conv.bias, x[1:]), 2)])


def _fold(x: torch.Tensor, frames: int) -> torch.Tensor:
    """[T,H,W,C] to [T/frames,H/2,W/2,frames·4·C]."""
    length, height, width, channels = x.shape
    x = x.view(length // frames, frames, height // 2, 2, width // 2, 2, channels)
    x = x.permute(0, 2, 4, 1, 3, 5, 6)
    return x.reshape(length // frames, height // 2, width // 2, frames * 4 * channels)


def _attention(x: torch.Tensor, attention: Any) -> torch.Tensor:
    """Each frame attends to itself and all frames before it."""
    rows = ops.norm_rows(x, norm_factor(attention.norm), silu=False).flatten(0, 2)
    query, key, value = (pointwise(rows, layer) for layer in (attention.to_q, attention.to_k, attention.to_v))
    size = x.shape[1] * x.shape[2]
    mixed = torch.cat(
        [
            ops.attend(query[end - size : end], key[:end], value[:end])
            for end in range(size, len(rows) + 1, size)
        ]
    )
    h = F.linear(mixed, attention.proj_out.weight.flatten(1)).view(x.shape)
    return ops.add_rows(x, h, attention.proj_out.bias)
