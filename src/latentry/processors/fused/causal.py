"""Causal convolutions over a clip that is encoded in temporal chunks.

Each convolution sees the last two frames of the chunk before. Chunks limit the memory, and keep every tensor under
2^31 values, above which cuDNN has only slow kernels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from latentry.processors.fused.self_check import fixed_noise, vae_moments
from latentry.processors.fused.structure import Described

_MAX_VALUES = (1 << 31) - 1
_INPUT_BYTES = 21
"""For each pixel of a clip, all copies of its colours while it is encoded: as bytes, and three times in 16 bits."""
_FIRST_CHANNELS = 16

RMS_NORM_2D = Described(parameters={"gamma": (None, 1, 1)}, channel_first=True)
RMS_NORM_3D = Described(parameters={"gamma": (None, 1, 1, 1)}, channel_first=True)


class FrameCache:
    """The last frames of the previous chunk, for each layer that needs them. One clip has one cache."""

    def __init__(self) -> None:
        self._frames: dict[int, torch.Tensor] = {}

    def get(self, layer: Any) -> torch.Tensor | None:
        """The frames stored for this layer; None in a clip's first chunk."""
        return self._frames.get(id(layer))

    def put(self, layer: Any, frames: torch.Tensor) -> None:
        """Store frames, in the place of the last ones: memory that is freed and allocated again gets fragmented."""
        kept = self._frames.get(id(layer))
        if kept is None:
            self._frames[id(layer)] = frames.clone()
        else:
            kept.copy_(frames)


class TemporalChunks:
    """Splits clips into chunks: the first has n·step+1 frames, the others n·step, as many as the memory allows.

    If chunks are as short as possible, the first has a single frame. What the layers keep is then allocated while little
    else is, which leaves the rest of the memory in one piece.

    Args:
        values_per_pixel: The number of channels of the widest layer's input.
        step: How many frames become one latent frame.
        value_bytes: The size of one value.
        live: How many tensors as large as the widest layer's input exist at the same time for each frame of a chunk.
        kept: How many such frames are kept from one chunk for the next, by all layers together.
    """

    def __init__(
        self, values_per_pixel: int, step: int, value_bytes: int = 2, *, live: float, kept: float
    ) -> None:
        self._values_per_pixel = values_per_pixel
        self._step = step
        self._value_bytes = value_bytes
        self._live, self._kept = live, kept
        self.memory_bytes = math.inf
        """The working memory for a clip."""

    def bytes_needed(self, shape: Sequence[int], num_frames: int | None = None) -> int:
        """The working memory for clips of [3,T,H,W], which are encoded one after the other.

        Args:
            shape: The shape of one clip.
            num_frames: The length of the chunks after the first. None for the shortest chunks.
        """
        frames, height, width = shape[-3:]
        in_chunk = min(frames, self._step if num_frames in (None, self._step) else num_frames + 1)
        widest = self._values_per_pixel * self._value_bytes
        per_pixel = (self._live * in_chunk + self._kept) * widest + _INPUT_BYTES * frames
        return int(height * width * per_pixel)

    def split(self, clip: torch.Tensor, max_frames: int | None = None) -> Iterator[torch.Tensor]:
        """The chunks of [T,H,W,3], of at most ``max_frames`` if given, which must be n·step+1."""
        length = self.length(clip.shape) if max_frames is None else max_frames - 1
        start = 0
        end = 1 if max_frames is None and length == self._step else length + 1
        while start < len(clip):
            yield clip[start:end]
            start, end = end, end + length

    def length(self, shape: Sequence[int]) -> int:
        """The length of the chunks of [T,H,W,3], except the first. All chunks are about equally long."""
        frames, height, width, channels = shape
        most = (_MAX_VALUES // (height * width * self._values_per_pixel) - 1) // self._step * self._step
        clip = (channels, frames, height, width)
        while most > self._step and self.bytes_needed(clip, most) > self.memory_bytes:
            most -= self._step
        num_chunks = max(1, -(-(frames - 1) // max(self._step, most)))
        return max(1, -(-(frames - 1) // (num_chunks * self._step)) * self._step)


class CausalEncoder(ABC):
    """The common part of encoders for causal video VAEs: ``encoder(clips)`` is ``vae.encode(clips)``'s moments.

    Args:
        vae: The VAE. Its encoder's weights are stored with the channels last from now on.
        first_conv: Its first convolution.
        chunks: How to split clips.
    """

    check_size: ClassVar[tuple[int, int]]
    """Height and width of the clips for the self check, whose latents have odd sides."""

    def __init__(self, vae: Any, first_conv: Any, chunks: TemporalChunks) -> None:
        self._encoder = vae.encoder
        self._first = FirstConv(first_conv)
        self._chunks = chunks
        use_channels_last(vae.encoder)

    def use_memory(self, num_bytes: float) -> None:
        """Encode each clip with at most this much working memory, in chunks as long as that allows."""
        self._chunks.memory_bytes = num_bytes

    def bytes_needed(self, shape: Sequence[int]) -> int:
        """The least working memory for clips of [B,3,T,H,W]: they are encoded one after the other."""
        return self._chunks.bytes_needed(shape[1:])

    @classmethod
    def check_inputs(cls, vae: Any) -> list[tuple[Any, ...]]:
        """A single frame, and a clip of two chunks."""
        return [(fixed_noise((1, 3, frames, *cls.check_size), vae), 5) for frames in (1, 9)]

    @staticmethod
    def reference(vae: Any, clips: torch.Tensor, max_frames: int | None = None) -> torch.Tensor:
        return vae_moments(vae, clips)

    def __call__(self, clips: torch.Tensor, max_frames: int | None = None) -> torch.Tensor:
        """Encode [B,3,T,H,W] in -1 … 1.

        Args:
            clips: The clips.
            max_frames: The most frames in a chunk, n·step+1. None leaves it to the memory.
        """
        encoded = []
        for clip in clips:
            frames = clip.permute(1, 2, 3, 0).contiguous()
            encoded.append(self._encode(self._chunks.split(frames, max_frames)))
        return torch.stack(encoded)

    @abstractmethod
    def _encode(self, chunks: Iterator[torch.Tensor]) -> torch.Tensor:
        """Encode the chunks [T,H,W,3] of one clip to moments [C,t,h,w]."""


def fold_time(weight: torch.Tensor) -> torch.Tensor:
    """Turn a 3D kernel into a 2D kernel over the channels of three frames.

    For few channels this is nearly twice as fast: cuDNN's 3D kernels for them do not use Hopper's matrix units.
    """
    folded = weight.permute(0, 2, 1, 3, 4).flatten(1, 2)
    return folded.contiguous(memory_format=torch.channels_last)


def conv2d(x: torch.Tensor, weight: torch.Tensor, padding: int = 1) -> torch.Tensor:
    """Convolve each frame of [T,H,W,C]."""
    return F.conv2d(x.permute(0, 3, 1, 2), weight, None, 1, padding).permute(0, 2, 3, 1).contiguous()


class FirstConv:
    """A model's first convolution, as a 2D convolution over the colours of three frames and a constant for the bias."""

    def __init__(self, conv: Any) -> None:
        out_channels, in_channels = conv.weight.shape[:2]
        self._num_unused = _FIRST_CHANNELS - 3 * in_channels - 1
        weight = conv.weight.new_zeros(out_channels, _FIRST_CHANNELS, 3, 3)
        weight[:, : 3 * in_channels] = fold_time(conv.weight)
        weight[:, 3 * in_channels, 1, 1] = conv.bias
        self._weight = weight.contiguous(memory_format=torch.channels_last)

    def __call__(self, frames: torch.Tensor, padding: int) -> torch.Tensor:
        """Convolve [T+2,H,W,3], of which the first two frames are those before the chunk."""
        shape = (len(frames) - 2, *frames.shape[1:3])
        constant, unused = frames.new_ones(*shape, 1), frames.new_zeros(*shape, self._num_unused)
        return conv2d(
            torch.cat([frames[:-2], frames[1:-1], frames[2:], constant, unused], dim=-1),
            self._weight,
            padding,
        )


def conv3d(
    x: torch.Tensor, conv: Any, bias: torch.Tensor | None, padding: tuple[int, int, int] = (0, 0, 0)
) -> torch.Tensor:
    """Convolve [T,H,W,C] with a layer's weights and stride, and with this bias and padding instead of the layer's."""
    y = F.conv3d(x.permute(3, 0, 1, 2)[None], conv.weight, bias, conv.stride, padding)
    return y[0].permute(1, 2, 3, 0).contiguous()


def pointwise(x: torch.Tensor, conv: Any) -> torch.Tensor:
    """A convolution with a kernel of one point, computed as a matrix product."""
    return F.linear(x, conv.weight.flatten(1), conv.bias)


def use_channels_last(module: torch.nn.Module) -> None:
    """Store the weights of all convolutions with the channels last, as their inputs are."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Conv3d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last_3d)
        elif isinstance(layer, torch.nn.Conv2d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)


def norm_factor(norm: Any) -> torch.Tensor:
    """An RMS norm's weights times its constant factor."""
    factor: torch.Tensor = norm.gamma.flatten() * norm.scale
    return factor.float()
