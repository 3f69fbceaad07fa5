"""The encoders of T5 (FLUX), UMT5 (Wan) and ByT5: one fused attention, and one pass for each norm and gate."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from latentry.processors.fused import ops
from latentry.processors.fused.self_check import fixed_tokens
from latentry.processors.fused.structure import (
    DROPOUT,
    EMBEDDING,
    Absent,
    Anything,
    Described,
    Each,
    OneOf,
    linear,
    matches,
)
from latentry.processors.memory.offload import StreamedLayers

_CHECK_LENGTH = 40

_LINEAR = OneOf(
    linear(bias=False),
    Described(parameters={"quantized": (None, None), "scale": (None, 1)}),  # fp8.Fp8Linear
)
_NORM = Described(parameters={"weight": (None,)})
_ATTENTION = Described(
    children={
        "layer_norm": _NORM,
        "dropout": DROPOUT,
        "SelfAttention": Described(
            children={
                "q": _LINEAR,
                "k": _LINEAR,
                "v": _LINEAR,
                "o": _LINEAR,
                "relative_attention_bias": OneOf(Absent(), EMBEDDING),
            },
            is_decoder=False,
        ),
    }
)
_FEED_FORWARD = Described(
    children={
        "layer_norm": _NORM,
        "dropout": DROPOUT,
        "DenseReluDense": Described(
            children={
                "wi_0": _LINEAR,
                "wi_1": _LINEAR,
                "wo": _LINEAR,
                "dropout": DROPOUT,
                "act": Anything(),  # named by the configuration
            }
        ),
    }
)
_STRUCTURE = Described(
    children={
        "shared": EMBEDDING,
        "encoder": Described(
            children={
                "embed_tokens": OneOf(Absent(), EMBEDDING),
                "block": Each(
                    Described(children={"layer": Described(children={"0": _ATTENTION, "1": _FEED_FORWARD})})
                ),
                "final_layer_norm": _NORM,
                "dropout": DROPOUT,
            }
        ),
    }
)


class T5Encoder:
    """``encoder(tokens, mask)`` is ``model(tokens, mask).last_hidden_state``."""

    name: ClassVar[str] = "T5"

    def __init__(self, model: Any) -> None:
        self._embedding = model.shared
        self._stack = model.encoder
        self._biases: dict[tuple[int, int], torch.Tensor] = {}

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether the feed-forward layers are gated with the tanh form of gelu, and the norms are RMS norms.

        That is so for all of T5 1.1, UMT5 and ByT5.
        """
        return (
            matches(model, _STRUCTURE)
            and bool(model.config.is_gated_act)
            and model.config.dense_act_fn == "gelu_new"
            and all(hasattr(norm, "variance_epsilon") for norm in _norms(model.encoder))
            and all(
                getattr(block.layer[0].SelfAttention, "scaling", 1.0) == 1.0
                for block in model.encoder.block.children()
            )
        )

    @classmethod
    def check_inputs(cls, model: Any) -> list[tuple[Any, ...]]:
        """The same tokens without a mask, and with masks of several lengths."""
        tokens = fixed_tokens((3, _CHECK_LENGTH), model.config.vocab_size, model)
        lengths = torch.tensor([[_CHECK_LENGTH], [17], [1]], device=model.device)
        mask = (torch.arange(_CHECK_LENGTH, device=model.device) < lengths).long()
        return [(tokens,), (tokens, mask)]

    @staticmethod
    def reference(model: Any, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden: torch.Tensor = model(tokens, mask).last_hidden_state
        return hidden

    def __call__(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = F.embedding(tokens, self._embedding.weight)
        hidden = None if mask is None else (mask[:, None, None, :] == 0)
        bias: torch.Tensor | None = None
        for number, block in enumerate(self._stack.block):
            attention, feed_forward = block.layer[0], block.layer[-1]
            # In T5 all layers share the first one's bias; in UMT5 each has its own.
            if attention.SelfAttention.has_relative_attention_bias:
                bias = self._bias(number, attention.SelfAttention, tokens.shape[1])
            assert bias is not None
            masked = bias if hidden is None else bias.masked_fill(hidden, torch.finfo(bias.dtype).min)
            x = x + _attend(_rms(x, attention.layer_norm), attention.SelfAttention, masked)
            dense = feed_forward.DenseReluDense
            h = _rms(x, feed_forward.layer_norm)
            # transformers keeps the last layer in float32 for float16 models, and with it the sum.
            x = x + dense.wo(ops.gelu_gate(dense.wi_0(h), dense.wi_1(h)).to(dense.wo.weight.dtype))
        return _rms(x, self._stack.final_layer_norm)

    def _bias(self, number: int, attention: Any, length: int) -> torch.Tensor:
        """The relative position bias of a layer. It is kept for later calls if the layer stays on the device."""
        if isinstance(self._stack.block, StreamedLayers):
            self._biases.clear()
            return attention.compute_bias(length, length).contiguous()  # type: ignore[no-any-return]
        if (number, length) not in self._biases:
            self._biases[number, length] = attention.compute_bias(length, length).contiguous()
        return self._biases[number, length]


OWN_MODULES_FACTOR = 4.5
"""How many times as much working memory the model's own modules take: 7.4 GB instead of 1.6 GB for 32 captions of 512
tokens on an H200."""


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """The working memory for each token.

    Args:
        config: The configuration of the model.
        dtype: What it computes in. Float16 models compute partly in float32.
    """
    itemsize = 4 if dtype == torch.float16 else dtype.itemsize
    return int((2 * config.d_ff + 7 * config.d_model) * itemsize)


def _norms(stack: Any) -> list[Any]:
    return [layer.layer_norm for block in stack.block.children() for layer in block.layer] + [
        stack.final_layer_norm
    ]


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
