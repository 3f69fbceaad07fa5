"""CLIP's text encoder.

Its own forward asks whether it is being recorded and then takes another way through attention, whose last bits
differ: a sample would depend on how many came before it. Here it is one way always.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def states_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What the model itself says of [B,L] tokens: all their states, and after them the pooled one."""
    found = model(tokens, output_hidden_states=False)
    return torch.cat([found.last_hidden_state, found.pooler_output[:, None]], dim=1)


class ClipEncoder:
    """``encoder(tokens)`` is ``states_of(model, tokens)``."""

    def __init__(self, model: Any) -> None:
        self._body = getattr(model, "text_model", model)  # what it was called in older versions
        self._end = model.config.eos_token_id

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether its layers are those known here."""
        layers = getattr(model, "text_model", model).encoder.layers
        return all(type(layer).__name__ == "CLIPEncoderLayer" for layer in layers)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self._body.embeddings(input_ids=tokens)
        for layer in self._body.encoder.layers:
            x = x + _attend(layer.layer_norm1(x), layer.self_attn)
            x = x + layer.mlp(layer.layer_norm2(x))
        x = self._body.final_layer_norm(x)
        # Older configurations name a wrong end; there it is the highest token.
        ends = tokens if self._end == 2 else tokens == self._end
        pooled = x[torch.arange(len(x), device=x.device), ends.int().argmax(dim=-1)]
        return torch.cat([x, pooled[:, None]], dim=1)


def _attend(x: torch.Tensor, attention: Any) -> torch.Tensor:
    query, key, value = (
        layer(x).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attention.out_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
