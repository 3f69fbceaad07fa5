"""Captions as sequences of small word vectors: deterministic, a millisecond each, no download.

A caption is split into word pieces, and each piece is looked up in a table that ``training/distill_text.py`` distilled
from a sentence encoder. The mean of the vectors is similar for captions of similar meaning, which is enough to try out
a pipeline.
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
        self._ids = {piece: i for i, piece in enumerate(pieces)}
        self._longest = max(map(len, pieces))
        self._table = torch.from_numpy(table)
        self.num_dims = table.shape[1]

    @staticmethod
    @functools.cache
    def identity() -> str:
        return hashlib.blake2b(_ASSET.read_bytes(), digest_size=16).hexdigest()

    def encode(self, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors [64,D], padded with zeros, and their mean [D], scaled to unit length."""
        ids = [i for word in _WORDS.findall(caption.lower()) for i in self._pieces(word)]
        vectors = self._table[ids[:MAX_PIECES]]
        padded = torch.zeros(MAX_PIECES, self.num_dims)
        padded[: len(vectors)] = vectors
        mean = vectors.mean(dim=0) if len(vectors) else torch.zeros(self.num_dims)
        return padded, torch.nn.functional.normalize(mean, dim=0)

    def _pieces(self, word: str) -> list[int]:
        """Split a word greedily into the longest pieces of the vocabulary; a word that cannot be split is unknown."""
        ids, start = [], 0
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                found = self._ids.get(("##" if start else "") + word[start:end])
                if found is not None:
                    ids.append(found)
                    start = end
                    break
            else:
                return [self._ids["[UNK]"]]
        return ids
