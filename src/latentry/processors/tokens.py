"""Tokens of captions, padded to one length."""

from __future__ import annotations

from typing import Any

import torch

from latentry.errors import ModelError


def padded_tokens(tokenizer: Any, captions: list[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B,length] and their mask, truncated and padded as the tokenizer itself does it.

    The tokenizer's own padding creates a Python integer for every position, which takes several times as long as the
    tokenizing.
    """
    if tokenizer.pad_token_id is None:
        raise ModelError(
            f"the model's {type(tokenizer).__name__} has no padding token; its folder is incomplete"
        )
    found = tokenizer(captions, max_length=length, truncation=True, return_attention_mask=False).input_ids
    tokens = torch.full((len(captions), length), tokenizer.pad_token_id)
    mask = torch.zeros_like(tokens)
    for i, ids in enumerate(found):
        span = slice(len(ids)) if tokenizer.padding_side == "right" else slice(length - len(ids), None)
        tokens[i, span] = torch.tensor(ids)
        mask[i, span] = 1
    return tokens, mask
