"""Seeds derived from names: the same parts give the same number on every machine and in every process."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: int | str) -> int:
    """A 63-bit number that depends on every part: ``derived_seed(seed, epoch, "bucket", 3)``."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
