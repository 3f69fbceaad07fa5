"""diffusers' ``AutoencoderKL`` (FLUX's VAE), its encoder only."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from latentry.processors.fused import ops
from latentry.processors.fused.causal import with_channels_last


class ImageEncoder:
    """``encoder(pixels)`` is ``vae.encode(pixels)``'s moments, for [B,3,H,W] in -1 … 1."""

    def __init__(self, vae: Any) -> None:
        self._encoder = vae.encoder
        self._quant_conv = vae.quant_conv
        with_channels_last(vae.encoder)

    @staticmethod
    def supports(vae: Any) -> bool:
        """Whether the VAE is built of what is known here: plain blocks, one head of attention in the middle."""
        encoder = vae.encoder
        blocks = [type(block).__name__ for block in encoder.down_blocks]
        attentions = encoder.mid_block.attentions
        return (
            set(blocks) == {"DownEncoderBlock2D"}
            and all(a is not None and a.heads == 1 and a.residual_connection for a in attentions)
            and all(a.rescale_output_factor == 1 for a in attentions)
            and vae.config.act_fn == "silu"
            and isinstance(encoder.conv_norm_out, torch.nn.GroupNorm)
            and encoder.conv_norm_out.affine
        )

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
    """A convolution of [B,H,W,C], with another bias than its own."""
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
