"""Which `autograd.Function` runs its forward, told from Python's frames.

Until torch 2.13 `Function.apply` is a function of Python's with a frame of its own. From 2.14 on it
is C++'s, and the innermost frame that is left of it is that of the user's `forward`: known by the
context that it gets, or by its code where it gets none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from inspect import CO_VARARGS
from types import CodeType, FrameType
from typing import Any

from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

_APPLY: CodeType | None = getattr(getattr(Function.apply, "__func__", None), "__code__", None)
_MOST_KNOWN = 4096

_known: dict[int, tuple[CodeType, str]] = {}
"""By the id of code that is called `forward`: the function whose it is, empty where of none."""


def name_function(frame: FrameType) -> str:
    """Name the autograd function that begins its forward at a frame; empty where none does."""
    code = frame.f_code
    if _APPLY is not None:
        return frame.f_locals["cls"].__name__ if code is _APPLY else ""
    context = find_context(frame)
    if context is not None:
        return str(type(context)._forward_cls.__name__)
    return _name_forward(code) if code.co_name == "forward" else ""


def find_context(frame: FrameType) -> Any:
    """Give the context of an autograd function that a frame got first of all; else None."""
    code = frame.f_code
    if code.co_argcount:
        first = frame.f_locals.get(code.co_varnames[0])
    elif code.co_flags & CO_VARARGS:  # a decorator's, mostly
        given = frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount])
        first = given[0] if isinstance(given, tuple) and given else None
    else:
        return None
    return first if isinstance(first, BackwardCFunction) else None


def _name_forward(code: CodeType) -> str:
    """Name the autograd function whose forward gets no context and has this code."""
    # By identity: to hash a code object is to read all of it.
    known = _known.get(id(code))
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        kinds = (one for one in _list_functions(Function) if _code_of(one) is code)
        name = next((one.__name__ for one in kinds), "")
        known = _known[id(code)] = code, name
    return known[1]


def _list_functions(kind: type[Function]) -> Iterator[type[Function]]:
    for one in kind.__subclasses__():
        yield one
        yield from _list_functions(one)


def _code_of(function: type[Function]) -> CodeType | None:
    return getattr(inspect.unwrap(function.forward), "__code__", None)
