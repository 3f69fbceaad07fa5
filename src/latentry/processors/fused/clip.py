"""CLIP's text encoder.

transformers' own forward selects another attention kernel while a CUDA graph is captured, and the last bits of the two
kernels differ. A sample's numbers would then depend on how many batches came before it. Here the kernel is always the
same.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from latentry.processors.fused.self_check import fixed_tokens
from latentry.processors.fused.structure import LAYER_NORM, Anything, Described, Each, linear, matches

_CHECK_LENGTH = 24
_OLD_END_TOKEN = 2
"""Configurations of old checkpoints name this end token, which is wrong. There it is the highest id of a caption."""

_STRUCTURE = Described(
    children={
        "embeddings": Anything(),
        "encoder": Described(
            children={
                "layers": Each(
                    Described(
                        children={
                            "layer_norm1": LAYER_NORM,
                            "self_attn": Described(
                                children={
                                    "q_proj": linear(bias=True),
                                    "k_proj": linear(bias=True),
                                    "v_proj": linear(bias=True),
                                    "out_proj": linear(bias=True),
                                }
                            ),
                            "layer_norm2": LAYER_NORM,
                            "mlp": Anything(),
                        }
                    )
                )
            }
        ),
        "final_layer_norm": LAYER_NORM,
    }
)


class ClipEncoder:
    """``encoder(tokens)`` is ``ClipEncoder.reference(model, tokens)``: all states, and the pooled state after them."""

    name: ClassVar[str] = "CLIP"

    def __init__(self, model: Any) -> None:
        self._body = _body(model)
        self._end_token = model.config.eos_token_id

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether each layer is attention and an MLP with a layer norm before each. Embeddings and MLP may be any."""
        return matches(_body(model), _STRUCTURE) and all(
            getattr(attention, "scale", None)
            == (attention.q_proj.out_features // attention.num_heads) ** -0.5
            for attention in (layer.self_attn for layer in _body(model).encoder.layers)
        )

    @classmethod
    def check_inputs(cls, model: Any) -> list[tuple[Any, ...]]:
        """Captions of several lengths, each with an end token."""
        tokens = fixed_tokens((3, _CHECK_LENGTH), model.config.vocab_size - 1, model)
        end = model.config.eos_token_id
        for i, length in enumerate((_CHECK_LENGTH, 9, 2)):
            tokens[i, length - 1] = model.config.vocab_size - 1 if end == _OLD_END_TOKEN else end
        return [(tokens,)]

    @staticmethod
    def reference(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """All states of [B,L] tokens, and after them the pooled state, as the model itself computes them."""
        found = model(tokens, output_hidden_states=False)
        return torch.cat([found.last_hidden_state, found.pooler_output[:, None]], dim=1)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self._body.embeddings(input_ids=tokens)
        for layer in self._body.encoder.layers:
            x = x + _attend(layer.layer_norm1(x), layer.self_attn)
            x = x + layer.mlp(layer.layer_norm2(x))
        x = self._body.final_layer_norm(x)
        ends = tokens if self._end_token == _OLD_END_TOKEN else tokens == self._end_token
        pooled = x[torch.arange(len(x), device=x.device), ends.int().argmax(dim=-1)]
        return torch.cat([x, pooled[:, None]], dim=1)


def _body(model: Any) -> Any:
    """The model without the wrapper that older releases of transformers have."""
    return getattr(model, "text_model", model)


def _attend(x: torch.Tensor, attention: Any) -> torch.Tensor:
    query, key, value = (
        layer(x).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attention.out_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
