"""How a script ended: its exit code, what is said about it, and signals on the way.

the script ended               0, or 1 where that is asked for because of findings
it raised                      1
sys.exit(n)                    n
Ctrl-C                         130
SIGTERM                        143
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED = 130
TERMINATED = 143

_OWN_FOLDER = str(Path(__file__).resolve().parent.parent)


class Terminated(SystemExit):
    """Unwind a script that was told to end; `except Exception` does not stop it."""


class EnoughSteps(SystemExit):
    """Unwind a script that has made as many steps as were wanted."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a script ended."""

    code: int
    """The exit code that Python would give."""

    status: str
    """The same in the words of a run: finished, failed or interrupted."""

    error: BaseException | None = None
    """What ended it, where Python would print that."""


def read_ending(error: BaseException | None) -> Ending:
    """Tell what Python would make of what came out of a script."""
    if error is None or isinstance(error, EnoughSteps):
        return Ending(0, "finished")
    if isinstance(error, Terminated):
        return Ending(TERMINATED, "interrupted")
    if isinstance(error, KeyboardInterrupt):
        return Ending(INTERRUPTED, "interrupted", error)
    if isinstance(error, SystemExit):
        return _read_exit(error)
    return Ending(1, "failed" if isinstance(error, Exception) else "interrupted", error)


def _read_exit(error: SystemExit) -> Ending:
    if error.code is None:
        return Ending(0, "finished")
    if isinstance(error.code, int):
        code = error.code & 0xFF
        return Ending(code, "failed" if code else "finished")
    return Ending(1, "failed", error)


def show_error(error: BaseException) -> None:
    """Print what ended a script as Python would, without the frames that are hookline's."""
    if isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
        return
    leave_out_own_frames(error)
    # A script may have put a hook of its own, such as rich's.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        traceback.print_exception(error)


def leave_out_own_frames(error: BaseException) -> None:
    """Take hookline's frames out of a traceback, and out of those of its causes."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _filter(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _filter(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER + os.sep):
            kept.append(trace)
        trace = trace.tb_next
    result = None
    for one in reversed(kept):
        result = TracebackType(result, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return result


def await_threads(known: Collection[threading.Thread]) -> None:
    """Wait for the threads that a script has begun, as Python does at its end; not for daemons.

    Those that were `known` before are not the script's.
    """

    def find() -> list[threading.Thread]:
        here = threading.current_thread()
        return [
            one
            for one in threading.enumerate()
            if not one.daemon and one is not here and one not in known
        ]

    if find():
        # Pools are told first that nothing more comes: their threads would wait for it forever.
        tellers = getattr(threading, "_threading_atexits", [])
        while tellers:
            tellers.pop()()
    while threads := find():
        for one in threads:
            one.join()


@contextlib.contextmanager
def ending_on_terminate() -> Iterator[None]:
    """Unwind the script on SIGTERM, so that its run is closed; a handler of its own stays."""
    is_possible = threading.current_thread() is threading.main_thread()
    if not is_possible or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    here = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != here:  # a forked worker ends as it would have without us
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        raise Terminated(TERMINATED)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def unhurried() -> Iterator[Hurry]:
    """Finish what is begun, whatever is pressed meanwhile; the result tells whether it was."""
    hurry = Hurry()
    if threading.current_thread() is not threading.main_thread():
        yield hurry
        return
    before: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.getsignal(number)
        signal.signal(number, hurry.note)
    try:
        yield hurry
    finally:
        for one, handler in before.items():
            # None: somebody's handler that Python does not know; it cannot be put back from here.
            signal.signal(one, signal.SIG_DFL if handler is None else handler)


class Hurry:
    """Whether somebody wants it to end at once."""

    def __init__(self) -> None:
        self.is_asked = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Take a signal; the second one is obeyed."""
        if self.is_asked:
            os._exit(INTERRUPTED if number == signal.SIGINT else TERMINATED)
        self.is_asked = True
        sys.stderr.write("\nhookline: the run is being closed; once more to leave at once\n")
