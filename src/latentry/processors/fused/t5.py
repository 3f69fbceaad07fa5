"""T5's encoder (FLUX), UMT5's (Wan) and ByT5's, with one fused attention and one pass per norm and gate."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from latentry.processors.fused import ops


class T5Encoder:
    """``encoder(tokens, mask)`` is ``model(tokens, mask).last_hidden_state``."""

    def __init__(self, model: Any) -> None:
        self._embedding = model.shared
        self._stack = model.encoder
        self._biases: dict[int, list[torch.Tensor]] = {}

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether its feed-forward layers are gated with the tanh form of gelu, as in all of T5 1.1."""
        return bool(model.config.is_gated_act and model.config.dense_act_fn == "gelu_new")

    def __call__(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = F.embedding(tokens, self._embedding.weight)
        hidden = None if mask is None else (mask[:, None, None, :] == 0)
        for block, bias in zip(self._stack.block, self._bias(tokens.shape[1]), strict=True):
            if hidden is not None:
                bias = bias.masked_fill(hidden, torch.finfo(bias.dtype).min)
            attention, feed_forward = block.layer[0], block.layer[-1]
            x = x + _attend(_rms(x, attention.layer_norm), attention.SelfAttention, bias)
            dense = feed_forward.DenseReluDense
            h = _rms(x, feed_forward.layer_norm)
            # In float16 the last layer, and so the sum, is kept in float32.
            x = x + dense.wo(ops.gelu_gate(dense.wi_0(h), dense.wi_1(h)).to(dense.wo.weight.dtype))
        return _rms(x, self._stack.final_layer_norm)

    def _bias(self, length: int) -> list[torch.Tensor]:
        """What each layer adds to its scores by distance; in T5 all layers share the first one's."""
        if length not in self._biases:
            biases: list[torch.Tensor] = []
            for block in self._stack.block:
                attention = block.layer[0].SelfAttention
                if attention.has_relative_attention_bias:
                    biases.append(attention.compute_bias(length, length).contiguous())
                else:
                    biases.append(biases[-1])
            self._biases[length] = biases
        return self._biases[length]


def _rms(x: torch.Tensor, norm: Any) -> torch.Tensor:
    if x.dtype == norm.weight.dtype:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
    weight: torch.Tensor = norm.weight
    return F.rms_norm(x, (x.shape[-1],), None, norm.variance_epsilon).to(weight.dtype) * weight


def _attend(x: torch.Tensor, attention: Any, bias: torch.Tensor) -> torch.Tensor:
    batch, length, _ = x.shape
    query, key, value = (
        layer(x).view(batch, length, attention.n_heads, attention.key_value_proj_dim).transpose(1, 2)
        for layer in (attention.q, attention.k, attention.v)
    )
    bias = bias.expand(batch, -1, length, length)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
    return attention.o(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]
