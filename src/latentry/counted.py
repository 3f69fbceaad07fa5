"""Counts in sentences: ``1 sample``, ``2 samples``."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A number and its noun, which gets an ``s`` unless the number is 1.

    >>> counted(1, "sample"), counted(2, "sample")
    ('1 sample', '2 samples')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
