"""A browser for the tests that look at pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opened_pages import CHROMIUM


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Give a browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()
