"""A page in a real browser, and what it said and asked for while it was open."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, and there is none")

NAMES = 104
"""How wide the names of the map are: thirteen letters of `blocks.1.attn`, and some room."""


class Visit:
    """A page that is open, and everything that it complained of or asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "color_scheme": "light", **options}
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(5000)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = path.as_uri()
        self.page.goto(self.url)
        self.page.wait_for_selector("html[data-ready=yes]", timeout=20_000)

    def text(self, selector: str) -> str:
        """Give the text of the one element that a selector means."""
        return str(self.page.locator(selector).inner_text())

    def choose(self, name: str) -> None:
        """Choose one of a row of choices, as a click on its word does."""
        self.page.locator(".choice").get_by_text(name, exact=True).click()

    def wait_for_site(self, address: str) -> None:
        """Wait until a site is the chosen one."""
        self.page.wait_for_function(
            "name => document.querySelector('.site-name').textContent === name", arg=address
        )

    def cell(
        self, row: int, column: int, *, rows: int = 5, columns: int = 10
    ) -> tuple[float, float]:
        """Tell where on the screen a cell of the map is."""
        marks = self.page.locator(".heat-marks")
        marks.scroll_into_view_if_needed()
        box = marks.bounding_box()
        # As the map lays itself out: names on the left, an axis below, markers above.
        x = box["x"] + NAMES + (column + 0.5) / columns * (box["width"] - NAMES - 12)
        return x, box["y"] + 14 + (row + 0.5) / rows * (box["height"] - 44)
