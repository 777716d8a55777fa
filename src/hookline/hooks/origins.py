"""Say of a callable what it is called, where its code is, and whose it is. Calls nothing."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import _WrappedHook

_INSTALLED = ("site-packages", "dist-packages")
# Not by sysconfig, which reads the whole build configuration to say the same.
_STANDARD_LIBRARY = Path(os.__file__).parent


class Origin(NamedTuple):
    """Say where a callable comes from."""

    name: str
    """Its qualified name, without partials and wrappers."""

    location: str
    """`file:line`, relative to the current or the installation folder; empty for built-in code."""

    owner: str
    """`torch`, `hookline`, another package, `python`, or `you` for what is installed nowhere."""


def find_origin(function: Any) -> Origin:
    """Find where a callable comes from."""
    function = _unwrap(function)
    if isinstance(function, FunctionType):
        # Not __qualname__ and __module__: functools.wraps gives those of the function it wraps.
        package = _package(function.__globals__.get("__name__"))
        return _of_code(function.__code__.co_qualname, function, package)
    if hasattr(function, "__qualname__"):  # a class, or a function written in C
        owner = _package(getattr(function, "__module__", None)) or "python"
        return Origin(function.__qualname__, "", "python" if owner == "builtins" else owner)
    kind = type(function)
    method = _unwrap(kind.forward if issubclass(kind, nn.Module) else kind.__call__)
    if isinstance(method, FunctionType):
        return _of_code(kind.__qualname__, method, _package(kind.__module__))
    return Origin(kind.__qualname__, "", _package(kind.__module__) or "python")


def _unwrap(function: Any) -> Any:
    """Look behind partials, bound methods, and what torch puts around a function."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        elif isinstance(function, _WrappedHook):
            function = function.hook
        elif _is_decorated_by_torch(function):
            function = function.__wrapped__
        else:
            return function


def _is_decorated_by_torch(function: Any) -> bool:
    """Tell `@torch.no_grad()` from the wrappers of others, which are what one looks for."""
    return (
        isinstance(function, FunctionType)
        and hasattr(function, "__wrapped__")
        and _package(function.__globals__.get("__name__")) == "torch"
    )


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _of_code(name: str, function: FunctionType, package: str) -> Origin:
    code = function.__code__
    path = Path(code.co_filename)
    place = next((i for i, part in enumerate(path.parts) if part in _INSTALLED), None)
    if place is not None:
        installed = Path(*path.parts[place + 1 :])
        owner = installed.parts[0].removesuffix(".py")
        shown = installed
    elif path.is_relative_to(_STANDARD_LIBRARY):
        owner, shown = "python", path.relative_to(_STANDARD_LIBRARY)
    else:
        owner = "you"
        here = Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
    if package in ("torch", "hookline"):  # also where they are installed from their sources
        owner = package
    return Origin(name, f"{shown}:{code.co_firstlineno}", owner)
