"""Properties to check for any configuration: a loader resumes exactly, two caches are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from latentry.serve.loader import LatentDataLoader


def assert_resumes(make_loader: Callable[[], LatentDataLoader], stop_after: int) -> None:
    """Check that an epoch that is stopped and resumed equals an uninterrupted one, and that the next pass is whole.

    >>> assert_resumes(lambda: build_text_to_image_multiresolution_dataloader(cache_dir=cache)[0], 3)

    Args:
        make_loader: Returns a new loader at every call.
        stop_after: The number of batches before the stop.
    """
    undisturbed = [_content(batch) for batch in make_loader()]
    first = make_loader()
    seen = []
    if stop_after:
        for batch in first:
            seen.append(_content(batch))
            if len(seen) == stop_after:
                break
    state = json.loads(json.dumps(first.state_dict()))
    assert state["batches_yielded"] == stop_after, f"{stop_after} batches received, but the state is {state}"
    second = make_loader()
    second.load_state_dict(state)
    assert len(second) == len(undisturbed)
    seen += [_content(batch) for batch in second]
    assert seen == undisturbed, "the resumed epoch differs from the undisturbed one"
    assert [_content(batch) for batch in second] == undisturbed, "the pass after the resumed one is not whole"


def _content(batch: Mapping[str, Any]) -> str:
    """A digest of everything in a batch."""
    digest = hashlib.blake2b()
    for key, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor):
            value = f"{value.dtype}{list(value.shape)}{value.float().cpu().numpy().tobytes().hex()}"
        elif isinstance(value, Mapping):
            value = _content(value)
        digest.update(f"{key}={value}\n".encode())
    return digest.hexdigest()


def assert_same_cache(first: Path, second: Path) -> None:
    """Check that two caches have the same files with the same bytes, except for their own paths in rows.

    Args:
        first: A cache.
        second: Another cache.
    """
    names = [
        sorted(p.relative_to(c).as_posix() for p in c.rglob("*") if p.is_file()) for c in (first, second)
    ]
    assert names[0] == names[1], f"files differ: {sorted(set(names[0]) ^ set(names[1]))[:10]}"
    for name in names[0]:
        contents = [(cache / name).read_bytes() for cache in (first, second)]
        if name.startswith("metadata_shard_"):
            contents = [
                content.replace(str(cache.absolute()).encode(), b"CACHE")
                for content, cache in zip(contents, (first, second), strict=True)
            ]
        assert contents[0] == contents[1], f"{name} differs"
