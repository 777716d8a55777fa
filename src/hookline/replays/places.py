"""Where an operation was called: in which module's forward, and on which line of the user's code.

Told from the Python frames alone, as the addresses of operations are counted.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Container
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from hookline._functions import find_context, name_function
from hookline.hooks.frames import CALL_CODE
from hookline.surveys.naming import show_file

_TORCH = str(Path(torch.__file__).parent)
_HOOKLINE = str(Path(__file__).parents[1])
_DEMO = str(Path(__file__).parents[1] / "demo")
_STANDARD = str(Path(linecache.__file__).parent)
_INSTALLED = ("site-packages", "dist-packages")
_STARTS = tuple(
    str(Path(__file__).parents[1] / one)
    for one in (
        "replays/finding.py",
        "scripts/launching.py",
        "comparisons/catching.py",
        "comparisons/rerunning.py",
    )
)
"""Where a replay begins, and a script: whatever called these is not what is looked for."""


class Owner(NamedTuple):
    """The module whose forward called an operation."""

    module: nn.Module | None
    """The module; None for code outside of any."""
    inside: str
    """What it was called in there that has no address: an autograd function, or a module that is
    not part of the model."""
    is_direct: bool
    """Whether the forward was called by itself, past the module's hooks."""
    frame: int
    """What tells one execution of a forward from the next, where no hook does."""


class SourceLine(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int

    @property
    def place(self) -> str:
        """File and line: `model.py:48`."""
        return f"{show_file(self.file)}:{self.number}" if self.file else ""

    @property
    def text(self) -> str:
        """What stands there."""
        return linecache.getline(self.file, self.number).strip() if self.file else ""


NO_LINE = SourceLine("", 0)


def find_owner(frame: FrameType | None, known: Container[int]) -> Owner:
    """Find the innermost module that runs at a frame, of those whose id is known."""
    inside = ""
    while frame is not None:
        code = frame.f_code
        if code is CALL_CODE:
            module = frame.f_locals["self"]
            if id(module) in known:
                return Owner(module, inside, False, id(frame))
            inside = inside or type(module).__name__
        elif applied := name_function(frame):
            inside = applied
        elif code.co_name == "forward" and code.co_argcount:
            this = frame.f_locals.get(code.co_varnames[0])
            if isinstance(this, nn.Module) and id(this) in known:
                return Owner(this, inside, not _is_called(frame), id(frame))
        frame = frame.f_back
    return Owner(None, inside, False, 0)


def _is_called(frame: FrameType) -> bool:
    """Tell whether a forward runs because its module was called."""
    above = frame.f_back
    for _ in range(8):  # decorators may stand between
        if above is None:
            return False
        if above.f_code is CALL_CODE:
            return above.f_locals.get("self") is frame.f_locals.get(frame.f_code.co_varnames[0])
        above = above.f_back
    return False


def find_line(frame: FrameType | None) -> SourceLine:
    """Find the innermost line at a frame that is neither torch's, hookline's nor Python's own."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_user(file):
            return SourceLine(file, frame.f_lineno)
        if file in _STARTS:
            break
        frame = frame.f_back
    return NO_LINE


def find_function(frame: FrameType | None) -> tuple[Any, SourceLine] | None:
    """Find the outermost autograd function that runs inside of a module's forward at a frame.

    Gives its context, which is the node of the backward, and the line that applies it.
    """
    found: tuple[Any, SourceLine] | None = None
    context: Any = None
    while frame is not None and frame.f_code is not CALL_CODE:
        here = find_context(frame)
        if context is not None and here is not context:
            found = context, find_line(frame)
        context, frame = here, frame.f_back
    return found


@functools.lru_cache(maxsize=4096)
def is_of_user(file: str) -> bool:
    """Tell whether a file is the user's, or of a library that models are written in."""
    if file.startswith("<frozen"):
        return False
    if _is_below(file, _DEMO):  # written as a user would
        return True
    if any(f"/{one}/" in file.replace("\\", "/") for one in _INSTALLED):
        return not _is_below(file, _TORCH) and not _is_below(file, _HOOKLINE)
    return not any(_is_below(file, one) for one in (_TORCH, _HOOKLINE, _STANDARD))


def _is_below(file: str, folder: str) -> bool:
    return file.startswith(folder) and file[len(folder) : len(folder) + 1] in "/\\"
