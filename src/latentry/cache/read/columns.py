"""A batch of samples by field: the one type that a batch has from the disk to the collate function.

Making, checking and stacking tensors one sample at a time costs a third of reading them. So a field whose tensors are
alike in all samples is one stacked tensor from the start. Dictionaries, one per sample, are made only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch

Column: TypeAlias = "torch.Tensor | list[torch.Tensor | None]"
"""One field's tensors: stacked to [B, ...], or a list where samples differ, with None for a sample without it."""


@dataclass(frozen=True, eq=False, slots=True)
class Columns:
    """Some samples, by field.

    >>> columns = dataset.read_batch([3, 4])
    >>> columns.tensors["latent"].shape
    torch.Size([2, 16, 64, 64])

    A field is in ``tensors`` if a sample has a tensor for it, and in ``values`` if a sample has a plain value for it.
    If some samples have a tensor and others a plain value, the field is in both. A sample with a tensor then has None
    in ``values``, and a sample with a plain value has None in ``tensors``.
    """

    num_samples: int
    tensors: Mapping[str, Column]
    values: Mapping[str, Sequence[Any]]
    """Plain values, one per sample; None for a sample without one."""
    describe: Callable[[int], str]
    """Says where sample ``i`` is stored, for error messages."""

    @classmethod
    def of_items(cls, items: Sequence[Mapping[str, Any]]) -> Columns:
        """The samples of these dictionaries. Tensors stay in lists and are not copied."""
        tensors: dict[str, Column] = {}
        values: dict[str, Sequence[Any]] = {}
        for key in dict.fromkeys(chain.from_iterable(items)):
            found = [item.get(key) for item in items]
            as_tensors = [value if isinstance(value, torch.Tensor) else None for value in found]
            plain = [None if isinstance(value, torch.Tensor) else value for value in found]
            if any(tensor is not None for tensor in as_tensors):
                tensors[key] = as_tensors
            if key not in tensors or any(value is not None for value in plain):
                values[key] = plain
        files = values.get("cache_file", [None] * len(items))

        def describe(i: int) -> str:
            return f"sample {i} of the batch" if files[i] is None else str(files[i])

        return cls(len(items), tensors, values, describe)

    def items(self) -> list[dict[str, Any]]:
        """One dictionary per sample. Their tensors share the memory of the columns; a missing plain value is None."""
        items: list[dict[str, Any]] = [{} for _ in range(self.num_samples)]
        for key, values in self.values.items():
            for item, value in zip(items, values, strict=True):
                item[key] = value
        for key, column in self.tensors.items():
            for item, tensor in zip(items, column, strict=True):
                if tensor is not None:
                    item[key] = tensor
        return items
