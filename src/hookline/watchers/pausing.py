"""A watch that measures nothing for a while."""

from __future__ import annotations

from typing import Protocol


class Pausable(Protocol):
    """What can go on after a pause."""

    is_open: bool

    def resume(self) -> None:
        """Go on."""


class Pause:
    """What `Watch.pause` gives: at the end of a `with`, the watch goes on."""

    def __init__(self, paused: Pausable) -> None:
        self._paused = paused

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        if self._paused.is_open:
            self._paused.resume()
