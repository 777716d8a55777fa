"""How far an extraction is, for who watches it: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hookline.extractions.advancing import Advance, show_bytes, show_seconds
from hookline.watchers.describing import read_rank

Tell = Callable[[Advance], None]

_EVERY = 30.0
"""Seconds between two lines where there is no terminal."""


@contextmanager
def showing(progress: bool | None, on_progress: Tell | None) -> Iterator[Tell | None]:
    """Show how far it is on the standard error, and tell whoever asked to be told.

    Without a word about it, only on a terminal and where nobody asked. Of ranks that share a
    terminal, the first shows a bar.
    """
    is_terminal = sys.stderr.isatty()
    is_shown = is_terminal and on_progress is None if progress is None else progress
    rank, _ = read_rank()
    if not is_shown or (is_terminal and rank):
        yield on_progress
    elif is_terminal:
        with _Bar() as bar:
            yield _join(bar.tell, on_progress)
    else:
        yield _join(_Lines().tell, on_progress)


def _join(show: Tell, on_progress: Tell | None) -> Tell:
    if on_progress is None:
        return show

    def tell(advance: Advance) -> None:
        show(advance)
        on_progress(advance)

    return tell


class _Bar:
    """A bar with the rate, the bytes and the time that is left."""

    def __init__(self) -> None:
        from rich.console import Console  # loaded with the first bar, not with hookline
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=None, rate="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tell(self, advance: Advance) -> None:
        """Move the bar."""
        self._progress.update(
            self._task, completed=advance.samples, total=advance.total, rate=_describe(advance)
        )


class _Lines:
    """A line now and then, for a log."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def tell(self, advance: Advance) -> None:
        """Print a line, if the last was long ago."""
        if time.monotonic() - self._told < _EVERY:
            return
        self._told = time.monotonic()
        total = "" if advance.total is None else f" of {advance.total:,}"
        left = "" if advance.left is None else f", {show_seconds(advance.left)} left"
        print(f"{advance.samples:,}{total} samples, {_describe(advance)}{left}", file=sys.stderr)


def _describe(advance: Advance) -> str:
    return f"{advance.rate:,.1f}/s in batches of {advance.batch}, {show_bytes(advance.bytes)}"
