"""The definitions of a module's `forward` and of the methods it uses."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hookline.sources import NoSource, read

Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_methods(module: nn.Module) -> Iterator[tuple[str, Function]]:
    """Parse `forward` and, one after the other, each method of the class that it mentions."""
    order = type(module).__mro__
    own = module.__dict__.get("forward")
    if own is None:
        start = find_method(order, "forward", 0)
    else:  # put on this instance by another library; the class's is what it wraps, as a rule
        start = (0, "forward", getattr(inspect.unwrap(own), "__func__", inspect.unwrap(own)))
    waiting, seen = [start], set()
    while waiting:
        found = waiting.pop(0)
        if found is None or found[:2] in seen:
            continue
        level, name, method = found
        seen.add((level, name))
        function = _parse(method)
        if function is None:
            continue
        yield f"{order[level].__name__}.{name}", function
        this = first_argument(function)
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == this:
                waiting.append(find_method(order, node.attr, 0))
            elif isinstance(node.value, ast.Call) and _is_super(node.value.func):
                waiting.append(find_method(order, node.attr, level + 1))


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "super"


def find_method(
    order: tuple[type, ...], name: str, start: int
) -> tuple[int, str, Callable[..., Any]] | None:
    """Find where a class or one above it defines a method of its own, from a level on."""
    for level in range(start, len(order)):
        if order[level] is nn.Module:
            return None
        method = vars(order[level]).get(name)
        if method is not None:
            return (level, name, method) if inspect.isfunction(inspect.unwrap(method)) else None
    return None


def _parse(method: Callable[..., Any]) -> Function | None:
    try:
        return read(method).node
    except NoSource:
        return None


def first_argument(function: Function) -> str:
    """Give the name of the first argument, which is `self` as a rule."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments else ""
