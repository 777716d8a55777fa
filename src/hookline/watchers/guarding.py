"""What becomes of an error inside hookline: it is said once, and the training goes on without."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from hookline._errors import BadTraining, HooklineError
from hookline.watchers.working import say

_PACKAGE = Path(__file__).parent.parent


class Guard:
    """Keep errors of hookline's own from the training, unless it is strict."""

    def __init__(self, give_up: Callable[[], None], *, strict: bool = False) -> None:
        self._give_up = give_up
        self.strict = strict
        """Whether errors are raised and not said."""
        self.failure: BaseException | None = None
        """What ended the watch."""

    def take(self, error: BaseException) -> None:
        """Take an error that happened in the training's thread: say it, or raise it again.

        What was found wrong with the training is no error of hookline's, and goes through.
        """
        if self.strict or isinstance(error, BadTraining):
            raise error
        self.note(error)

    def note(self, error: BaseException) -> None:
        """Take an error that happened anywhere: the watch ends, with one message."""
        is_first = self.failure is None
        self.failure = error if is_first else self.failure
        self._give_up()
        if is_first and not self.strict:
            say(f"the watch has stopped and the training goes on. {describe(error)}")

    def raise_failure(self) -> None:
        """Where it is strict, raise what another thread could only note."""
        if self.strict and self.failure is not None:
            error, self.failure = self.failure, None
            raise error


def describe(error: BaseException) -> str:
    """Say what happened; of what should not have happened also where, and what to do about it."""
    if isinstance(error, HooklineError):
        return str(error)
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        return what
    return (
        f"{what}, inside hookline{_find_place(error)}. That is a bug in hookline: please report "
        "it, with the traceback that `hl.watch(..., strict=True)` gives."
    )


def _find_place(error: BaseException) -> str:
    """Name the innermost line of hookline's own that an error came through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_PACKAGE):
            return f" ({path.relative_to(_PACKAGE).as_posix()}:{frame.lineno})"
    return ""
