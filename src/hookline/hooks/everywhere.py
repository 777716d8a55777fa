"""Hooks on every module of every model, through torch's global module hooks.

Torch leaves a flag behind when a global hook with keyword arguments is removed, which makes
torch.compile warn for ever; here the flag goes with the hook. There is no root module: a call is
one execution of an outermost module, and a module's address is the name of its class.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from hookline._compiler import has_compiled_code
from hookline._errors import AddressError, SessionError
from hookline.addresses import PARAMETER_PORTS, Selection, Selector, Site, parse
from hookline.addresses.inside import MARKS
from hookline.addresses.names import find_wrapped
from hookline.hooks import checkpoints
from hookline.hooks.eagerly import stance
from hookline.hooks.frames import CALL_CODE
from hookline.hooks.junctions import Junction
from hookline.hooks.refusals import refuse_tracing
from hookline.hooks.sessions import Handle, Session
from hookline.hooks.visits import Call, Listener, Station, Visit

_Matcher = Callable[[nn.Module], bool]
_Maker = Callable[[Session, Station, Site], list[Listener]]


def read_selector(where: Selector) -> list[tuple[_Matcher, Site]]:
    """Turn a selector into tests of a module, each with the port it asks for."""
    if isinstance(where, Selection):
        address = parse(where.port if where.port[:1] in MARKS else f":{where.port}")
        return [(match, _site(address)) for match, _ in read_selector(where.selector)]
    if isinstance(where, str):
        address = parse(where)
        if address.path not in ("*", "**") or address.port in PARAMETER_PORTS:
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
    if address.inside is not None:
        raise AddressError(
            f"`{address}` is inside a forward, and with model=None none is exchanged: "
            "give the model that has it"
        )
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
        self.is_reusable = False
        self.epoch = object()
        self.follows_recompute = True
        self.calls = 0
        self._call_numbers = itertools.count()
        self.makers: list[tuple[_Matcher, Site]] = []
        self.make: _Maker
        self._latest = None
        self.active = {}
        self._junctions = []
        self.audits = []
        self._parameters = []
        self._regions = weakref.WeakKeyDictionary()
        # A station lives as long as something remembers a visit of it, and keeps its module's id.
        self._known: weakref.WeakValueDictionary[int, Station] = weakref.WeakValueDictionary()
        self._handles: list[Any] = []
        self._running: dict[int, list[tuple[nn.Module, Junction | None]]] = {}

    def open(self) -> None:
        if self.is_open or self._handles:
            raise SessionError(f"{self.purpose} is already open or was closed; make a new one.")
        self.is_eager = has_compiled_code()  # a graph knows nothing of hooks on all modules
        if self.is_eager:
            stance.refuse_inside()
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._before),
            torch_module.register_module_forward_hook(self._after, with_kwargs=True),
        ]
        self.is_open = True
        if self.is_eager:
            stance.take()

    def _detach(self) -> None:
        self.is_lingering = False
        for handle in self._handles:
            handle.remove()
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)
            torch_module._global_forward_hooks_always_called.pop(handle.id, None)
        self._running.clear()
        self._latest = None

    def begin(self, station: Station, thread: int, task: int, traced: int = 0) -> Visit | None:
        if task != -1 and checkpoints.is_recompute():
            return self._begin_again(station, task)
        call = self.active[thread]
        index = call.counts.get(station, 0)
        call.counts[station] = index + 1
        visit = Visit(station, call, index)
        if (
            checkpoints.in_checkpoint() is not None or not torch.is_grad_enabled()
            if call.grad_at_start
            else call.in_region
        ):
            self._note_regions(visit)
        return visit

    def end_root(self, call: Call) -> None:
        return None

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if torch.compiler.is_compiling():
            refuse_tracing()
        if find_wrapped(module) is not None:  # what it wraps runs next, and counts
            return None
        thread = get_ident()
        is_forward = not checkpoints.is_recompute()
        stack = self._running.setdefault(thread, [])
        del stack[_depth(sys._getframe(1)) :]  # modules that raised have no other end
        if is_forward and self.is_open and not stack:
            self._start_call(thread, is_implicit=False)
        # What is closed goes on only to repeat its edits where a checkpoint is recomputed.
        junction = self._listen(module) if self.is_open or not is_forward else None
        stack.append((module, junction))
        if junction is None:
            return None
        # Torch passes no keyword arguments to a global pre hook; its caller's frame has them.
        kwargs = sys._getframe(1).f_locals.get("kwargs", {})
        result = junction.enter(module, args, dict(kwargs))
        if result is None:
            return None
        kwargs.clear()
        kwargs.update(result[1])
        return result[0]

    def _listen(self, module: nn.Module) -> Junction | None:
        station = self._known.get(id(module))
        if station is None:
            station = self._known[id(module)] = Station((type(module).__name__,), module, False)
        listeners: list[Listener] = []
        for matches, site in self.makers:
            if matches(module):
                listeners.extend(self.make(self, station, site))
        if not self.is_open:
            listeners = [one for one in listeners if one.stage == 1 and one.values]
        if not listeners:
            return None
        junction = Junction(module)
        junction.join(self, station, listeners)
        return junction

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        stack = self._running.get(get_ident(), [])
        while any(running is module for running, _ in stack):
            running, junction = stack.pop()
            if running is module:
                return junction and junction.leave_call(module, args, kwargs, output)
        return None


def _depth(frame: FrameType) -> int:
    """Count the modules that run around the one whose hooks are called in this frame."""
    around: FrameType | None = frame
    modules = -1
    while around is not None:
        if around.f_code is CALL_CODE and find_wrapped(around.f_locals["self"]) is None:
            modules += 1
        around = around.f_back
    return modules


def attach(purpose: str, where: Selector, make: _Maker) -> Handle:
    """Attach listeners to every module that a selector without paths matches."""
    session = _GlobalSession(purpose)
    session.makers = read_selector(where)
    session.make = make
    session.open()
    return Handle(session)
