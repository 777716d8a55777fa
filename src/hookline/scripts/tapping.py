"""Hear of the outermost calls of modules, while a script runs.

`nn.Module.__call__` is exchanged for one that tells; afterwards it is torch's own again. A call
inside of a call costs one look at a flag.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling

from hookline._compiler import run_uncompiled


class CallHearer(Protocol):
    """Whoever wants to know of outermost calls."""

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Learn that a module is about to be called by something that is no module."""

    def end(self, module: nn.Module, result: Any) -> None:
        """Learn what the call has returned; not told of one that raised."""

    def begin_function(self) -> None:
        """Learn that a compiled function is about to be called by something that is no module."""


class _Here(threading.local):
    """What this thread is doing."""

    is_inside = False


class CallTap:
    """Tell one hearer of every outermost call; one at a time in a process."""

    def __init__(self, hearer: CallHearer) -> None:
        self._hearer = hearer
        self._own: Callable[..., Any] | None = None
        self._put: Callable[..., Any] | None = None
        self._own_compile: Callable[..., Any] | None = None
        self._here = _Here()
        self.has_compiled = False
        """Whether anything was given to torch.compile."""

    def start(self) -> None:
        """Begin to listen."""
        self._own = nn.Module.__call__
        self._put = nn.Module.__call__ = self._make(self._own)  # type: ignore[method-assign]
        self._own_compile = torch.compile
        torch.compile = self._make_compile(torch.compile)

    def stop(self) -> None:
        """Put back what is torch's, unless somebody put theirs over it; then ours does nothing."""
        self._hearer = _Deaf()
        if self._put is not None and nn.Module.__call__ is self._put:
            nn.Module.__call__ = self._own  # type: ignore[assignment,method-assign]
        if getattr(torch.compile, "__wrapped__", None) is self._own_compile is not None:
            torch.compile = self._own_compile
        self._own = self._put = self._own_compile = None

    def _make(self, own: Callable[..., Any]) -> Callable[..., Any]:
        here = self._here
        process = os.getpid()

        @functools.wraps(own)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or here.is_inside or os.getpid() != process:
                return own(module, *args, **kwargs)
            here.is_inside = True
            try:
                self._hearer.begin(module, args, kwargs)
                result = own(module, *args, **kwargs)
            finally:
                here.is_inside = False
            self._hearer.end(module, result)
            return result

        # Else a graph would begin here, around torch's own call and the hooks in it.
        tapped: Callable[..., Any] = run_uncompiled(call, is_deep=False)
        return tapped

    def _make_compile(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self.has_compiled = True
            made = own(*args, **kwargs)
            given = args[0] if args else kwargs.get("model")
            # A method is that of a model, whose calls are heard.
            return self._tell_of(made) if inspect.isfunction(given) else made

        return compile

    def _tell_of(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Tell of calls of a function that is compiled: what it calls is not heard."""
        here = self._here

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (is_compiling() or here.is_inside):
                self._hearer.begin_function()
            return compiled(*args, **kwargs)

        return call


class _Deaf:
    """Hear nothing."""

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        return None

    def end(self, module: nn.Module, result: Any) -> None:
        return None

    def begin_function(self) -> None:
        return None
