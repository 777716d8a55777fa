"""Spare the garbage collector its full searches while a graph with hooks in it is compiled.

So much is made meanwhile that it would search all that the process holds, again and again, and find
little. For a large model that takes longer than tracing hookline's operators does. What dies young
is collected still, if more seldom; the next full search is due when the graph is there.
"""

from __future__ import annotations

import gc
import importlib
from typing import Any

_NEVER = 1 << 30
"""How many smaller searches go before a full one, when there shall be none."""
_SELDOM = 10
"""How many times as much is made between searches of what is new."""
_graphs: set[str] = set()
"""What torch calls the graphs whose backward may have to be compiled yet."""
_compiling = ""
"""The graph that is being compiled; empty where none is."""
_spared: tuple[tuple[int, ...], tuple[int, ...]] | None = None
"""What the collector went by before, and what it goes by while it is spared."""


def spare_searches() -> None:
    """Have no full search until the graph is compiled that is being traced, if one is."""
    if _compiling:
        _graphs.add(_compiling)
        _spare()


def hear_of_compiling() -> None:
    """Have torch tell when it begins to compile a graph and when it ends; it may have forgotten."""
    told: Any = importlib.import_module("torch._dynamo.callback")
    handler = told.callback_handler
    if _begin not in handler.start_callbacks:
        _end()
        handler.start_callbacks.append(_begin)
        handler.end_callbacks.insert(0, _end)  # one that raises keeps the others from being called


def _begin(told: Any) -> None:
    global _compiling
    kind = told.callback_trigger.name
    if kind not in ("DYNAMO", "LAZY_BACKWARD"):
        return
    _compiling = told.compile_id
    is_known = _compiling in _graphs
    _graphs.discard(_compiling)  # another graph may have the name later
    if is_known and kind == "LAZY_BACKWARD":
        _spare()


def _end(_: Any = None) -> None:
    global _compiling, _spared
    _compiling = ""
    if _spared is not None:
        before, meanwhile = _spared
        if gc.get_threshold() == meanwhile:  # else somebody has set it since
            gc.set_threshold(*before)
        _spared = None


def _spare() -> None:
    global _spared
    if _spared is None:
        before = gc.get_threshold()
        gc.set_threshold(before[0] * _SELDOM, before[1], _NEVER)
        _spared = before, gc.get_threshold()
