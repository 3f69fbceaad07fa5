"""HunyuanVideo 1.5's causal video VAE, its encoder only.

Everything before the attention in the middle is causal convolutions and goes in stretches. The attention sees
all frames before its own: done frame by frame it needs neither the mask, nor half of the arithmetic, nor the
tens of gigabytes that scores of all with all take.
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
    conv3d,
    norm_factor,
    pointwise,
    with_channels_last,
)


class HunyuanEncoder:
    """``encoder(clips)`` is ``vae.encode(clips)``'s moments, for [B,3,T,H,W] in -1 … 1."""

    def __init__(self, vae: Any) -> None:
        self._encoder = vae.encoder
        widest = 2 * vae.encoder.conv_in.conv.out_channels
        self._chunks = TemporalChunks(widest, vae.temporal_compression_ratio, vae.dtype.itemsize)
        self.bytes_needed = self._chunks.bytes_needed
        self._first = FirstConv(vae.encoder.conv_in.conv)
        with_channels_last(vae.encoder)

    @staticmethod
    def supports(vae: Any) -> bool:
        """Whether channels divide as the downsampling here assumes."""
        downs = [down for block in vae.encoder.down_blocks for down in block.downsamplers or ()]
        groups = [_group(down) for down in downs]
        return all(group >= 2 and group & (group - 1) == 0 for group in groups) and all(
            down.conv.pad_mode == "replicate" for down in downs
        )

    def __call__(self, clips: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._encode(clip.permute(1, 2, 3, 0).contiguous()) for clip in clips])

    def _encode(self, clip: torch.Tensor) -> torch.Tensor:
        encoder, frame_cache = self._encoder, FrameCache()
        x = torch.cat([self._stretch(part, frame_cache) for part in self._chunks.of(clip)])
        frame_cache = FrameCache()
        x = _residual(x, encoder.mid_block.resnets[0], frame_cache)
        for attention, block in zip(encoder.mid_block.attentions, encoder.mid_block.resnets[1:], strict=True):
            x = _residual(_attention(x, attention) if attention is not None else x, block, frame_cache)
        conv = encoder.conv_out.conv
        h = conv3d(_padded(x, encoder.norm_out, None, encoder.conv_out, frame_cache), conv, None)
        return ops.add_group_mean(h, conv.bias, x).permute(3, 0, 1, 2)

    def _stretch(self, x: torch.Tensor, frame_cache: FrameCache) -> torch.Tensor:
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
    """The normed frames with their edges repeated, and before them the last two of the stretch before."""
    frames, height, width, channels = x.shape
    room = x.new_empty(frames + 2, height + 2, width + 2, channels)
    gamma = None if norm is None else norm_factor(norm)
    ops.norm_rows(x, gamma, bias, silu=silu, pad=1, out=room[2:])
    before = frame_cache.get(conv)
    room[:2] = room[2:3] if before is None else before
    frame_cache.keep(conv, room[-2:])
    return room


def _residual(x: torch.Tensor, block: Any, frame_cache: FrameCache) -> torch.Tensor:
    h = conv3d(_padded(x, block.norm1, None, block.conv1, frame_cache), block.conv1.conv, None)
    h = conv3d(
        _padded(h, block.norm2, block.conv1.conv.bias, block.conv2, frame_cache), block.conv2.conv, None
    )
    if block.conv_shortcut is not None:
        x = pointwise(x, block.conv_shortcut)
    return ops.add_rows(x, h, block.conv2.conv.bias)


def _group(down: Any) -> int:
    """How many channels the shortcut averages into one."""
    return int(down.group_size)


def _downsample(x: torch.Tensor, down: Any, frame_cache: FrameCache) -> torch.Tensor:
    """Space, and time if asked, folded into channels; beside the convolution a shortcut of averaged channels.

    Averaging neighbouring channels before folding is averaging after it, on a quarter or an eighth of the data.
    """
    conv = down.conv.conv
    starts = frame_cache.get(down.conv) is None
    h = conv3d(_padded(x, None, None, down.conv, frame_cache, silu=False), conv, None)
    if not down.add_temporal_downsample:
        return _fold(ops.add_group_mean(h, conv.bias, x), 1)
    if not starts:
        return _fold(ops.add_group_mean(h, conv.bias, x), 2)
    # The first frame has none to be folded with: it counts twice, and its shortcut averages half as many.
    first = _fold(h[:1] + conv.bias, 1).repeat(1, 1, 1, 2)
    half = _group(down) // 2
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
