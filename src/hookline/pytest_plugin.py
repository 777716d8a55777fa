"""The option `--hookline-update` of pytest: baselines of `hl.testing.assert_same_run` anew.

pytest loads this at its start, in every project that has hookline installed: it imports nothing.
"""

from __future__ import annotations

import os
from typing import Any

UPDATE = "HOOKLINE_UPDATE"
"""The variable of the environment that asks for it, also in processes that a test starts."""

_before: list[str | None] = []


def pytest_addoption(parser: Any) -> None:
    """Add the option."""
    group = parser.getgroup("hookline")
    group.addoption(
        "--hookline-update",
        action="store_true",
        default=False,
        help="record the baselines of hookline.testing.assert_same_run again",
    )


def pytest_configure(config: Any) -> None:
    """Ask for new baselines where the option is given."""
    if config.getoption("--hookline-update"):
        _before.append(os.environ.get(UPDATE))
        os.environ[UPDATE] = "1"


def pytest_unconfigure(config: Any) -> None:
    """Leave the environment as it was."""
    if config.getoption("--hookline-update") and _before:
        before = _before.pop()
        if before is None:
            os.environ.pop(UPDATE, None)
        else:
            os.environ[UPDATE] = before
