"""Watches that nobody has closed yet, and what becomes of them at the end and in a fork."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING

from hookline.runs import name_ending

if TYPE_CHECKING:
    from hookline.watchers.watch import Watch

unclosed: set[Watch] = set()
"""Those that still measure, held here: one whose name is gone has its hooks on the model yet."""


@atexit.register
def _close_all() -> None:
    """Complete the runs of watches that nobody closed."""
    # What nobody caught is left here by the interpreter; the older name is that of Python 3.11.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for one in list(unclosed):
        one.close(name_ending(error))


def _leave_to_parent() -> None:
    """In a forked process: measure nothing, the parent does."""
    for one in list(unclosed):
        one.give_up()
    unclosed.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
