"""What tests of compiled models start from."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def start_afresh(fresh_compiler: None) -> None:
    """Let no test here meet a graph of another."""
