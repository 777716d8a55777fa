"""What a called name stands for, found without running anything."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any

_UNKNOWN = object()


def resolve(
    node: ast.expr, function: FunctionType, local_names: frozenset[str]
) -> Callable[..., Any] | None:
    """Find what an expression in a function calls; None where only a run would tell."""
    found = _look_up(node, function, local_names)
    return found if found is not _UNKNOWN and callable(found) else None


def _look_up(node: ast.expr, function: FunctionType, local_names: frozenset[str]) -> Any:
    if isinstance(node, ast.Name):
        return _UNKNOWN if node.id in local_names else _outer_value(node.id, function)
    if isinstance(node, ast.Attribute):
        return _attribute(_look_up(node.value, function, local_names), node.attr)
    return _UNKNOWN


def _outer_value(name: str, function: FunctionType) -> Any:
    free = function.__code__.co_freevars
    if name in free and function.__closure__ is not None:
        try:
            return function.__closure__[free.index(name)].cell_contents
        except ValueError:  # not assigned yet
            return _UNKNOWN
    known, built_in = function.__globals__, vars(builtins)
    return known[name] if name in known else built_in.get(name, _UNKNOWN)


def _attribute(owner: Any, name: str) -> Any:
    """Look into dictionaries only: a module's or metaclass's `__getattr__` is somebody's code."""
    if isinstance(owner, ModuleType):
        return vars(owner).get(name, _UNKNOWN)
    if not isinstance(owner, type):
        return _UNKNOWN
    for above in owner.__mro__:
        if name in vars(above):
            found = vars(above)[name]
            if isinstance(found, staticmethod):
                return found.__func__
            if isinstance(found, classmethod):
                return MethodType(found.__func__, owner)
            return found
    return _UNKNOWN
