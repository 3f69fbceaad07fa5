"""Captions as sequences of small word vectors: deterministic, a millisecond each, no download.

A caption is cut into word pieces, and each piece is looked up in a table that
``training/distill_text.py`` made from a sentence encoder. The weighted mean of the pieces is close for
captions of like meaning and not for others, which is all that trying out a pipeline asks for.
"""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import resources

import numpy as np
import torch

MAX_PIECES = 64
_ASSET = resources.files("latentry.processors") / "assets" / "tiny_text.npz"
_WORDS = re.compile(r"\w+|[^\w\s]")


class TinyTextEncoder:
    def __init__(self) -> None:
        with resources.as_file(_ASSET) as path, np.load(path) as asset:
            pieces = asset["vocabulary"].tobytes().decode().split("\n")
            table = asset["table"].astype(np.float32) * asset["scale"].astype(np.float32)[:, None]
        self._numbers = {piece: number for number, piece in enumerate(pieces)}
        self._table = torch.from_numpy(table)
        self.num_dims = table.shape[1]

    @staticmethod
    @functools.cache
    def identity() -> str:
        return hashlib.blake2b(_ASSET.read_bytes(), digest_size=16).hexdigest()

    def encode(self, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors [64,D], zero behind the caption's end, and their mean [D] of unit length."""
        numbers = [number for word in _WORDS.findall(caption.lower()) for number in self._pieces(word)]
        vectors = self._table[numbers[:MAX_PIECES]]
        padded = torch.zeros(MAX_PIECES, self.num_dims)
        padded[: len(vectors)] = vectors
        mean = vectors.mean(dim=0) if len(vectors) else torch.zeros(self.num_dims)
        return padded, torch.nn.functional.normalize(mean, dim=0)

    def _pieces(self, word: str) -> list[int]:
        """The word in as few pieces as the vocabulary allows, longest first; unknown as a whole if not."""
        numbers, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                number = self._numbers.get(("##" if start else "") + word[start:end])
                if number is not None:
                    numbers.append(number)
                    start = end
                    break
            else:
                return [self._numbers["[UNK]"]]
        return numbers
