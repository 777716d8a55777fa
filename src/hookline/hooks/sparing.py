"""Spare the garbage collector its full searches while a graph with hooks in it is compiled.

So much is made meanwhile that it would search all that the process holds, again and again, and find
little. For a large model that takes longer than tracing hookline's operators does. What dies young
is collected as always; the next full search is due when the graph is there.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

_NEVER = 1 << 30
"""How many smaller searches go before a full one, when there shall be none."""
_SELDOM = 10
"""How many times as much is made between searches of what is new."""
_graphs: set[str] = set()
"""What torch calls the graphs whose backward may have to be compiled yet."""
_compiling = ""
"""The graph that is being compiled; empty where none is."""
_before: tuple[int, int, int] | None = None
"""What the collector went by, while it is spared."""


def spare_searches() -> None:
    """Have no full search until the graph is compiled that is being traced, if one is."""
    if _compiling:
        _graphs.add(_compiling)
        _spare()


def hear_of_compiling() -> None:
    """Have torch tell when it begins to compile a graph and when it ends; it may have forgotten."""
    told: Any = sys.modules["torch._dynamo.callback"]
    if _begin not in told.callback_handler.start_callbacks:
        told.on_compile_start(_begin)
        told.on_compile_end(_end)


def _begin(told: Any) -> None:
    global _compiling
    _compiling = told.compile_id
    is_known = _compiling in _graphs
    _graphs.discard(_compiling)  # another graph may have the name later
    if is_known and told.callback_trigger.name == "LAZY_BACKWARD":
        _spare()


def _end(_: Any) -> None:
    global _compiling, _before
    _compiling = ""
    if _before is not None:
        if gc.get_threshold()[2] == _NEVER:  # else somebody has set it since
            gc.set_threshold(*_before)
        _before = None


def _spare() -> None:
    global _before
    if _before is None:
        _before = gc.get_threshold()
        gc.set_threshold(_before[0] * _SELDOM, _before[1], _NEVER)
