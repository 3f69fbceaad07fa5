"""The encoder of diffusers' ``AutoencoderKL``, which is FLUX's VAE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from latentry.processors.fused import ops
from latentry.processors.fused.causal import use_channels_last
from latentry.processors.fused.self_check import fixed_noise, vae_moments
from latentry.processors.fused.structure import (
    DROPOUT,
    GROUP_NORM,
    SILU,
    Absent,
    Anything,
    Described,
    Each,
    OneOf,
    conv,
    linear,
    matches,
)

_LIVE_TENSORS = 5.3
"""How many tensors as large as the first layer's output exist at the same time: 10.9 GB for 8 images of 1024x1024."""
_WORKSPACE_BYTES = 500_000_000
"""What cuDNN takes besides, which a batch of one shows."""

_CONV = conv(2, 3, stride=(1, 1), padding=(1, 1))
_RESNET = Described(
    children={
        "norm1": GROUP_NORM,
        "conv1": _CONV,
        "norm2": GROUP_NORM,
        "dropout": DROPOUT,
        "conv2": _CONV,
        "nonlinearity": SILU,
        "conv_shortcut": OneOf(Absent(), conv(2, 1, stride=(1, 1), padding=(0, 0))),
    },
    output_scale_factor=1,
    upsample=None,
    downsample=None,
)
_DOWNSAMPLER = Described(
    children={"conv": conv(2, 3, stride=(2, 2), padding=(0, 0))}, use_conv=True, padding=0
)
_ATTENTION = Described(
    children={
        "group_norm": GROUP_NORM,
        "to_q": linear(bias=True),
        "to_k": linear(bias=True),
        "to_v": linear(bias=True),
        "to_out": Described(children={"0": linear(bias=True), "1": DROPOUT}),
    },
    heads=1,
    scale_qk=True,
    residual_connection=True,
    rescale_output_factor=1,
)
_STRUCTURE = Described(
    children={
        "encoder": Described(
            children={
                "conv_in": _CONV,
                "down_blocks": Each(
                    Described(
                        children={
                            "resnets": Each(_RESNET),
                            "downsamplers": OneOf(Absent(), Each(_DOWNSAMPLER)),
                        }
                    )
                ),
                "mid_block": Described(children={"resnets": Each(_RESNET), "attentions": Each(_ATTENTION)}),
                "conv_norm_out": GROUP_NORM,
                "conv_act": SILU,
                "conv_out": _CONV,
            }
        ),
        "quant_conv": Anything(),
        "decoder": Anything(),
        "post_quant_conv": Anything(),
    }
)


class ImageEncoder:
    """``encoder(pixels)`` is ``vae.encode(pixels)``'s moments, for [B,3,H,W] in -1 … 1."""

    name: ClassVar[str] = "image VAE"

    def __init__(self, vae: Any) -> None:
        self._encoder = vae.encoder
        self._quant_conv = vae.quant_conv
        self._row_bytes = vae.encoder.conv_in.out_channels * vae.dtype.itemsize
        use_channels_last(vae.encoder)

    def use_memory(self, num_bytes: float) -> None:
        """Images are always encoded whole, so only the size of a batch follows from the memory."""

    def bytes_needed(self, shape: Sequence[int]) -> int:
        """The working memory for images of [B,3,H,W]."""
        batch_size, _, height, width = shape
        return int(batch_size * height * width * _LIVE_TENSORS * self._row_bytes) + _WORKSPACE_BYTES

    @staticmethod
    def supports(vae: Any) -> bool:
        """Whether the VAE has plain convolutional blocks, and attention with one head in the middle."""
        return matches(vae, _STRUCTURE)

    @classmethod
    def check_inputs(cls, vae: Any) -> list[tuple[Any, ...]]:
        """Two images whose latents have odd sides."""
        return [(fixed_noise((2, 3, 40, 56), vae),)]

    @staticmethod
    def reference(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        return vae_moments(vae, pixels)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        encoder = self._encoder
        x = _conv(pixels.permute(0, 2, 3, 1), encoder.conv_in, encoder.conv_in.bias)
        for block in encoder.down_blocks:
            for resnet in block.resnets:
                x = _resnet(x, resnet)
            for downsampler in block.downsamplers or ():
                x = _downsample(x, downsampler.conv)
        x = _resnet(x, encoder.mid_block.resnets[0])
        for attention, resnet in zip(
            encoder.mid_block.attentions, encoder.mid_block.resnets[1:], strict=True
        ):
            x = _resnet(_attention(x, attention), resnet)
        x = ops.group_norm(x, encoder.conv_norm_out)
        moments = _conv(x, encoder.conv_out, encoder.conv_out.bias).permute(0, 3, 1, 2)
        return moments if self._quant_conv is None else self._quant_conv(moments)


def _conv(x: torch.Tensor, conv: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Convolve [B,H,W,C] with a layer's weights, stride and padding, and with this bias instead of the layer's."""
    y = F.conv2d(x.permute(0, 3, 1, 2), conv.weight, bias, conv.stride, conv.padding)
    return y.permute(0, 2, 3, 1).contiguous()


def _downsample(x: torch.Tensor, conv: Any) -> torch.Tensor:
    return _conv(F.pad(x, (0, 0, 0, 1, 0, 1)), conv, conv.bias)


def _resnet(x: torch.Tensor, resnet: Any) -> torch.Tensor:
    h = _conv(ops.group_norm(x, resnet.norm1), resnet.conv1, None)
    h = _conv(ops.group_norm(h, resnet.norm2, resnet.conv1.bias), resnet.conv2, None)
    if resnet.conv_shortcut is not None:
        x = F.linear(x, resnet.conv_shortcut.weight.flatten(1), resnet.conv_shortcut.bias)
    return ops.add_rows(x, h, resnet.conv2.bias)


def _attention(x: torch.Tensor, attention: Any) -> torch.Tensor:
    rows = ops.group_norm(x, attention.group_norm, silu=False).flatten(1, 2)
    query, key, value = (layer(rows) for layer in (attention.to_q, attention.to_k, attention.to_v))
    mixed = torch.stack([ops.attend(*sample) for sample in zip(query, key, value, strict=True)])
    out = attention.to_out[0]
    return ops.add_rows(x, F.linear(mixed, out.weight).view(x.shape), out.bias)
