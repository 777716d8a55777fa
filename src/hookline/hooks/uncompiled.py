"""What the compiler leaves alone: what opens and closes sessions, and forwards that it does anyway.

Such forwards are kept so while they are listened to.

Dynamo skips what is in torch's own files unless a graph has it inside: until torch 2.13
`nn.Linear(4, 4).compile()` makes no graph, and in later ones a layer that is called after a graph
break makes none. It makes one as soon as the module has hooks, and another kernel gives other bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn

from hookline._compiler import (
    is_compiled_if_hooked,
    is_run_uncompiled,
    leave_uncompiled,
    mark_uncompiled,
)
from hookline.hooks.module_hooks import is_own
from hookline.sources.unwrapping import copy_function

Function = TypeVar("Function", bound=Callable[..., Any])

_OUTSIDE = (
    "a session of hookline's begins and ends outside of graphs: open it around the call of what "
    "is compiled, not inside"
)


def outside_of_graphs(function: Function) -> Function:
    """Have what opens a session, or closes it, run as it is where a compiled function calls it.

    With `fullgraph=True` there is no such place, and torch says why.
    """
    left: Function = leave_uncompiled(function, _OUTSIDE)
    return left


def around_graphs(function: Function) -> Function:
    """Do so with what has a session open meanwhile, but not with what it calls."""
    left: Function = leave_uncompiled(function, _OUTSIDE, is_deep=False)
    return left


def is_left_alone(module: nn.Module, forward: Any) -> bool:
    """Tell whether a module's forward would run as it is if hookline were not there.

    Hooks of others count: with them the compiler takes the forward anyway.
    """
    function = forward.__func__ if isinstance(forward, MethodType) else forward
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    if not is_run_uncompiled(function.__code__):
        return False
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return all(map(is_own, hooks)) or not is_compiled_if_hooked(module)


def leave_alone(function: Any) -> Any:
    """Copy a function, bound or not, so that it runs as it is where the compiler meets it.

    What it calls is compiled as ever, and so is the copy inside a graph of what calls it.
    """
    if isinstance(function, MethodType):
        return MethodType(leave_alone(function.__func__), function.__self__)
    code = _marked(function.__code__, function.__code__.co_filename)
    return copy_function(function, code, function.__closure__)


# One copy for all, because modules share compiled graphs only if the code inside is the same. Equal
# code may be from another file.
@functools.lru_cache(maxsize=1024)
def _marked(code: CodeType, _file: str) -> CodeType:
    copied = code.replace()
    mark_uncompiled(copied, is_deep=False)
    return copied
