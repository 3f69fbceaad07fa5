"""Writing cache files: the same dictionary always gives the same bytes.

``meta`` and ``pt`` are what ``torch.save`` writes, readable with ``torch.load(weights_only=True)`` by this
library and by NeMo AutoModel. ``safetensors`` keeps the tensors as such and the plain values as JSON in
the file's header.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from latentry.storage import publish

PLAIN_VALUES_KEY = "latentry"


def cache_file_bytes(data: dict[str, Any], output_format: str) -> bytes:
    """The file's content. Tensors are copied out of any batch they are a part of."""
    data = {k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in data.items()}
    if output_format == "safetensors":
        from safetensors.torch import save

        tensors = {k: v.contiguous() for k, v in data.items() if isinstance(v, torch.Tensor)}
        plain = {k: v for k, v in data.items() if not isinstance(v, torch.Tensor)}
        return save(tensors, metadata={PLAIN_VALUES_KEY: json.dumps(plain)})
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getvalue()


def write_cache_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with publish(path) as draft:
        draft.write_bytes(content)
