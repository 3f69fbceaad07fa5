"""Sizes as people write them: ``12GB``, ``11.5 GB``, ``12GiB``."""

from __future__ import annotations

import re
from fractions import Fraction

from latentry.errors import ConfigError

_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """The number of bytes that a text means. A GB is 10^9 bytes, a GiB 2^30. A number without a unit is in bytes.

    >>> parse_bytes("11.5GB"), parse_bytes("12 gib"), parse_bytes("12000000000")
    (11500000000, 12884901888, 12000000000)

    Args:
        text: A number and a unit, in capital or small letters, with or without a space in between.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = (match[2].lower() or "b") if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write for example 12GB, 11.5GB or 12GiB")
    return int(Fraction(match[1]) * _UNITS[unit])


def in_gb(num_bytes: float) -> str:
    """A size in GB, rounded down to two decimal places.

    >>> in_gb(12e9), in_gb(12 * 2**30)
    ('12 GB', '12.88 GB')

    Args:
        num_bytes: A number of bytes, not infinite.
    """
    hundredths = int(num_bytes) // 10_000_000
    return f"{hundredths // 100}.{hundredths % 100:02d}".rstrip("0").rstrip(".") + " GB"
