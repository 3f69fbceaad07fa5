"""How far ``--text_dtype fp8`` moves the embeddings of text encoders, on a CPU.

    python benchmarks/text_fp8.py

The models have the depth of those in FLUX (T5), Wan (UMT5) and HunyuanVideo 1.5 (Qwen2.5-VL), a quarter of their width,
and random weights: each weight is drawn as the libraries draw it for training. Every distance is relative: the RMS of
the difference over the RMS of the reference. ``bfloat16`` is the distance of the same weights in bfloat16 from float32,
which is what a GPU run without ``fp8`` has anyway.

Random weights say little about trained ones. To measure a real model, pass its folder. That needs three times the
memory of the model in float32:

    python benchmarks/text_fp8.py --t5 FLUX.1/text_encoder_2
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from latentry.processors import fp8
from latentry.processors.fused.self_check import relative_errors

CPU = torch.device("cpu")
XXL_QUARTER = {
    "d_model": 1024, "d_kv": 64, "d_ff": 2560, "num_layers": 24, "num_heads": 16, "vocab_size": 4096,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip
QWEN_QUARTER = {
    "hidden_size": 896, "intermediate_size": 4736, "num_hidden_layers": 28, "num_attention_heads": 7,
    "num_key_value_heads": 1, "vocab_size": 4096, "bos_token_id": None, "eos_token_id": None,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
}  # fmt: skip

MODELS: dict[str, tuple[Any, Callable[[], Any], Callable[[Any], Any]]] = {
    "t5": (T5EncoderModel, lambda: T5Config(**XXL_QUARTER), lambda model: model.encoder.block),
    "umt5": (UMT5EncoderModel, lambda: UMT5Config(**XXL_QUARTER), lambda model: model.encoder.block),
    "qwen": (Qwen2_5_VLTextModel, lambda: Qwen2_5_VLTextConfig(**QWEN_QUARTER), lambda model: model.layers),
}
"""The class of each text encoder, the configuration of a random one, and its layers."""


def load(name: str, folder: Path | None) -> Any:
    kind, config, _ = MODELS[name]
    torch.manual_seed(0)
    model = kind(config()) if folder is None else kind.from_pretrained(folder, dtype=torch.float32)
    if name == "umt5":
        model.encoder.embed_tokens.weight = model.shared.weight
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def embeddings(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What the model's pipeline takes: the last hidden states, or the third last ones of Qwen."""
    if isinstance(model, Qwen2_5_VLTextModel):
        return model(tokens, output_hidden_states=True).hidden_states[-3].float()
    return model(tokens).last_hidden_state.float()


def quantized(model: Any, layers: Callable[[Any], Any]) -> Any:
    changed = copy.deepcopy(model)
    fp8.quantize(layers(changed), CPU)
    return changed


def measure(name: str, folder: Path | None, num_tokens: int) -> None:
    layers = MODELS[name][2]
    model = load(name, folder)
    tokens = torch.randint(
        0, model.config.vocab_size, (2, num_tokens), generator=torch.Generator().manual_seed(1)
    )
    reference = embeddings(model, tokens)
    changed = embeddings(quantized(model, layers), tokens)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    plain = embeddings(rounded, tokens)
    both = embeddings(quantized(rounded, layers), tokens)
    cosine = torch.nn.functional.cosine_similarity(changed, reference, dim=-1)
    distances = {
        "float32, fp8 from auto": relative_errors(changed, reference)[0],
        "bfloat16, fp8 from auto": relative_errors(both, plain)[0],
        "bfloat16 from float32": relative_errors(plain, reference)[0],
        "bfloat16 with fp8 from float32": relative_errors(both, reference)[0],
    }
    num_weights = sum(parameter.numel() for parameter in layers(model).parameters())
    print(f"{name}: {len(layers(model))} layers, {num_weights / 1e6:.0f} million weights in them")
    for what, distance in distances.items():
        print(f"  {what}: {distance:.3g}")
    print(f"  least cosine similarity of a token, float32: {cosine.min():.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="The distance between embeddings with and without 8-bit weights."
    )
    for name in MODELS:
        parser.add_argument(f"--{name}", type=Path, help=f"measure this {name} instead of a random one")
    parser.add_argument("--num_tokens", type=int, default=128)
    options = parser.parse_args()
    folders = {name: getattr(options, name) for name in MODELS}
    given = [name for name, folder in folders.items() if folder]
    for name in given or MODELS:
        measure(name, folders[name], options.num_tokens)
