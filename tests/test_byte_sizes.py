"""Sizes as people write them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentry.byte_sizes import in_gb, parse_bytes
from latentry.errors import ConfigError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip


@given(
    number=st.integers(0, 10**6),
    decimals=st.none() | st.integers(0, 999),
    unit=st.sampled_from(list(UNITS)),
    change=st.sampled_from([str, str.lower, str.upper]),
    space=st.sampled_from(["", " "]),
)
def test_every_way_to_write_a_size(number, decimals, unit, change, space):
    digits = str(number) if decimals is None else f"{number}.{decimals:03d}"
    assert parse_bytes(f"{digits}{space}{change(unit)}") == int(Fraction(digits) * UNITS[unit])


@given(st.integers(0, 10**8).map(lambda hundredths: hundredths * 10**7))
def test_sizes_that_are_shown_can_be_typed(num_bytes):
    assert parse_bytes(in_gb(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 GB"),
        (12e9, "12 GB"),
        (11.5e9, "11.5 GB"),
        (11_999_999_999, "11.99 GB"),
        (12 << 30, "12.88 GB"),
        (1_050_000_000, "1.05 GB"),
        (100e9, "100 GB"),
    ],
)
def test_sizes_are_rounded_down(num_bytes, shown):
    assert in_gb(num_bytes) == shown


@pytest.mark.parametrize(
    "text", ["", "lots", "GB", "12 G", "12GBs", "-1GB", "1e3GB", "12,5GB", "1.GB", "٣GB", "nan"]
)
def test_other_texts_are_errors(text):
    with pytest.raises(
        ConfigError, match=r"is not a size; write for example 12GB, 11\.5GB or 12GiB"
    ) as raised:
        parse_bytes(text)
    assert repr(text) in str(raised.value)
