"""Fixtures of the media tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quiet_encoders(monkeypatch):
    """Keep SVT-AV1 from writing to the terminal."""
    monkeypatch.setenv("SVT_LOG", "1")
