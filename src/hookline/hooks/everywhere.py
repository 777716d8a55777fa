"""Hooks on every module of every model, through torch's global module hooks.

Torch leaves a flag behind when a global hook with keyword arguments is removed, which makes
torch.compile warn for ever; here the flag goes with the hook. There is no root module: a call is
one execution of an outermost module, and a module's address is the name of its class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from hookline._errors import AddressError, SessionError
from hookline.addresses import Selection, Selector, Site, parse
from hookline.addresses.names import find_wrapped
from hookline.hooks.junctions import Junction, refuse_tracing
from hookline.hooks.sessions import Handle, Session
from hookline.hooks.visits import Call, Listener, Station, Visit

_Matcher = Callable[[nn.Module], bool]
_Maker = Callable[[Session, Station, Site], list[Listener]]


def read_selector(where: Selector) -> list[tuple[_Matcher, Site]]:
    """Turn a selector into tests of a module, each with the port it asks for."""
    if isinstance(where, Selection):
        address = parse(f":{where.port}")
        return [(match, _site(address)) for match, _ in read_selector(where.selector)]
    if isinstance(where, str):
        address = parse(where)
        if address.path not in ("*", "**") or address.port == "grad":
            raise AddressError(
                f"with model=None there are no paths: `{where}` cannot be looked up. Give `**`, a "
                "class, a predicate of (class name, module), or hl.port(nn.Linear, 'input.grad')"
            )
        return [(lambda module: True, _site(address))]
    site = _site(parse(":output"))
    if isinstance(where, type):
        kind = where
        return [(lambda module: isinstance(module, kind), site)]
    if isinstance(where, nn.Module):
        one = where
        return [(lambda module: module is one, site)]
    if callable(where):
        predicate = where
        return [(lambda module: predicate(type(module).__name__, module), site)]
    if isinstance(where, Iterable):
        return [pair for item in where for pair in read_selector(item)]
    raise AddressError(f"a `{type(where).__name__}` is no selector")


def _site(address: Any) -> Site:
    anyone = nn.Module()
    port = address.port or "output"
    return Site(("*",), anyone, port, address.leaf, address.is_grad, None, False)


class _GlobalSession(Session):
    """A session without a model: stations are made as modules run."""

    def __init__(self, purpose: str) -> None:
        self.tree = None
        self.purpose = purpose
        self.is_open = False
        self.is_lingering = False
        self.calls = 0
        self.makers: list[tuple[_Matcher, Site]] = []
        self.make: _Maker
        self._latest = None
        self._active = {}
        self._handles: list[Any] = []
        self._running: dict[int, list[tuple[nn.Module, Junction | None]]] = {}

    def open(self) -> None:
        if self.is_open or self._handles:
            raise SessionError(f"{self.purpose} is already open or was closed; make a new one.")
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._before),
            torch_module.register_module_forward_hook(self._after, with_kwargs=True),
        ]
        self.is_open = True

    def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        for handle in self._handles:
            handle.remove()
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)
            torch_module._global_forward_hooks_always_called.pop(handle.id, None)
        self._running.clear()

    def begin(self, station: Station, thread: int, task: int) -> Visit | None:
        if not self.is_open:
            return None
        if task != -1:
            visit = Visit(station, self.latest_call(), None)
            visit.is_recompute = True
            return visit
        call = self._active.get(thread)
        if call is None or len(self._running[thread]) == 1:
            call = self._active[thread] = self._latest = Call(self.calls, thread, False)
            self.calls += 1
        key: Any = id(station.module)
        index = call.counts.get(key, 0)
        call.counts[key] = index + 1
        return Visit(station, call, index)

    def end_root(self, visit: Visit) -> None:
        return None

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if torch.compiler.is_compiling():
            refuse_tracing()
        stack = self._running.setdefault(get_ident(), [])
        if find_wrapped(module) is not None:  # what it wraps runs next, and counts
            return None
        station = Station((type(module).__name__,), module, False)
        listeners = []
        for matches, site in self.makers:
            if matches(module):
                listeners.extend(self.make(self, station, site))
        if not listeners:
            stack.append((module, None))
            return None
        junction = Junction()
        junction.join(self, station, listeners)
        stack.append((module, junction))
        # Torch passes no keyword arguments to a global pre hook; its caller's frame has them.
        kwargs = sys._getframe(1).f_locals.get("kwargs", {})
        result = junction.enter(module, args, dict(kwargs))
        if result is None:
            return None
        kwargs.clear()
        kwargs.update(result[1])
        return result[0]

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        stack = self._running.get(get_ident(), [])
        while stack:  # modules above this one that raised have no other end
            running, junction = stack.pop()
            if running is module:
                if junction is None:
                    return None
                return junction.leave_call(module, args, kwargs, output)
        return None


def attach(purpose: str, where: Selector, make: _Maker) -> Handle:
    """Attach listeners to every module that a selector without paths matches."""
    session = _GlobalSession(purpose)
    session.makers = read_selector(where)
    session.make = make
    session.open()
    return Handle(session)
