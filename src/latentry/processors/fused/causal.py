"""Causal convolutions over a clip that comes in stretches: each sees the last two frames before its stretch.

TemporalChunks bound the frame_cache, and keep every tensor under 2^31 values, beyond which cuDNN has only slow kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from latentry.hardware import share_of_memory

_MAX_VALUES = (1 << 31) - 1
_TENSORS_ALIVE = 4
"""As large as the widest layer's input, at once."""
_FIRST_CHANNELS = 16


class FrameCache:
    """The frames that each convolution needs of the stretch before."""

    def __init__(self) -> None:
        self._frames: dict[int, torch.Tensor] = {}

    def get(self, owner: Any) -> torch.Tensor | None:
        """The frames kept for this layer; None in a clip's first stretch."""
        return self._frames.get(id(owner))

    def keep(self, owner: Any, frames: torch.Tensor) -> None:
        self._frames[id(owner)] = frames.clone()


class TemporalChunks:
    """Cuts clips into parts: the first of n·step+1 frames, the others of n·step, as long as frame_cache allows.

    ``values_per_pixel`` is what the widest layer's input has. How long they are is decided when a shape first
    comes up, and kept to.
    """

    def __init__(self, values_per_pixel: int, step: int, value_bytes: int = 2) -> None:
        self._values_per_pixel = values_per_pixel
        self._step = step
        self._value_bytes = value_bytes
        self._lengths: dict[tuple[int, ...], int] = {}

    def bytes_needed(self, clips: torch.Tensor) -> int:
        """What encoding [B,3,T,H,W] takes at the least: the clip itself and its shortest stretch."""
        frames, height, width = clips.shape[-3:]
        shortest = (self._step + 1) * self._values_per_pixel * _TENSORS_ALIVE
        return height * width * (4 * frames + shortest) * self._value_bytes

    def of(self, clip: torch.Tensor) -> Iterator[torch.Tensor]:
        """The parts of [T,H,W,3]."""
        shape = tuple(clip.shape)
        if shape not in self._lengths:
            self._lengths[shape] = self._length(clip)
        length = self._lengths[shape]
        start = 0
        while start < len(clip):
            end = min(len(clip), start + length + (start == 0))
            yield clip[start:end]
            start = end

    def _length(self, clip: torch.Tensor) -> int:
        frames, height, width, _ = clip.shape
        limit = min(_MAX_VALUES, share_of_memory(clip.device) / (_TENSORS_ALIVE * clip.element_size()))
        most = (
            max(1, (int(limit) // (height * width * self._values_per_pixel) - 1) // self._step) * self._step
        )
        num_parts = max(1, -(-(frames - 1) // most))
        return max(1, -(-(frames - 1) // (num_parts * self._step)) * self._step)


def fold_time(weight: torch.Tensor) -> torch.Tensor:
    """A 3D kernel as a 2D one over three frames' channels.

    For few channels that is nearly twice as quick: cuDNN's 3D kernels for them do not use Hopper's matrix units.
    """
    folded = weight.permute(0, 2, 1, 3, 4).flatten(1, 2)
    return folded.contiguous(memory_format=torch.channels_last)


def conv2d(x: torch.Tensor, weight: torch.Tensor, padding: int = 1) -> torch.Tensor:
    """A convolution of the frames of [T,H,W,C]."""
    return F.conv2d(x.permute(0, 3, 1, 2), weight, None, 1, padding).permute(0, 2, 3, 1).contiguous()


class FirstConv:
    """A model's first convolution, over three frames' colours and a constant that carries the bias."""

    def __init__(self, conv: Any) -> None:
        out_channels, in_channels = conv.weight.shape[:2]
        self._spare = _FIRST_CHANNELS - 3 * in_channels - 1
        weight = conv.weight.new_zeros(out_channels, _FIRST_CHANNELS, 3, 3)
        weight[:, : 3 * in_channels] = fold_time(conv.weight)
        weight[:, 3 * in_channels, 1, 1] = conv.bias
        self._weight = weight.contiguous(memory_format=torch.channels_last)

    def __call__(self, room: torch.Tensor, padding: int) -> torch.Tensor:
        """For [T+2,H,W,3], the first two being the frames before."""
        shape = (len(room) - 2, *room.shape[1:3])
        constant, spare = room.new_ones(*shape, 1), room.new_zeros(*shape, self._spare)
        return conv2d(
            torch.cat([room[:-2], room[1:-1], room[2:], constant, spare], dim=-1), self._weight, padding
        )


def conv3d(
    x: torch.Tensor, conv: Any, bias: torch.Tensor | None, padding: tuple[int, int, int] = (0, 0, 0)
) -> torch.Tensor:
    """A convolution of [T,H,W,C], with another bias and padding than its own."""
    y = F.conv3d(x.permute(3, 0, 1, 2)[None], conv.weight, bias, conv.stride, padding)
    return y[0].permute(1, 2, 3, 0).contiguous()


def pointwise(x: torch.Tensor, conv: Any) -> torch.Tensor:
    """A convolution of a single point, which is a matrix product."""
    return F.linear(x, conv.weight.flatten(1), conv.bias)


def with_channels_last(module: torch.nn.Module) -> None:
    """Lay out the weights of all convolutions as their inputs will be."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Conv3d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last_3d)
        elif isinstance(layer, torch.nn.Conv2d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)


def norm_factor(norm: Any) -> torch.Tensor:
    """The RMS norm's weights times its constant factor."""
    factor: torch.Tensor = norm.gamma.flatten() * norm.scale
    return factor.float()
