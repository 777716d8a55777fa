"""One execution of a module that is under way, and who may be promised gradients in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline.hooks.visits import Listener, Visit

if TYPE_CHECKING:
    from hookline.hooks import aliases, gradients
    from hookline.hooks.sessions import Session

CALL_CODE = nn.Module._call_impl.__code__
"""What runs a module's hooks and forward."""

Waiting = tuple[str, deque[tuple[int, Any]]]
"""A name inside forward, and its latest values with their numbers."""


class Frame:
    """One execution of a module: the visits it is to the sessions, and what happens inside it."""

    # Made for every execution of every module that is listened at, so only what differs is set.
    tap: tuple[Tensor, Tensor, gradients.RelayOne, int] | None = None
    """The only argument, its alias, who delivers its gradient, and the version it had."""

    taps: aliases.InputTaps | None = None
    """The taps on several arguments."""

    received: Mapping[int, int] = MappingProxyType({})
    """The version that each argument came in with, by its id."""

    waiting: dict[tuple[Listener, str], Waiting] | None = None
    """What may turn out to be the last of its name."""

    views: list[gradients.ViewRelay] | None = None
    """The hooks on views that were assigned inside."""

    regions: WeakKeyDictionary[Any, dict[Any, int]] | None = None
    """The first number of each variable in a checkpointed part of forward, and how far its
    recompute has come."""

    depth = 0
    """How many executions of a rewritten forward are under way that no hook announced."""

    error_before: BaseException | None = None
    """The error that was being handled already when it began."""

    is_over = False
    """Whether the module has returned."""

    def __init__(self, module: nn.Module, visits: dict[Session, Visit]) -> None:
        self.module = module
        """The module that runs; a replica of the one that was attached to, under DataParallel."""
        self.visits = visits
        self.counts: dict[str, int] = {}
        """How often each variable was assigned and each operation called, by `@name` or `/name`."""


def versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int]:
    """Note the version of each tensor that comes in and may have a gradient."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return {id(args[0]): args[0]._version} if args[0].requires_grad else {}
    found = {}
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.requires_grad:
                found[id(value)] = value._version
        elif value is not None:
            for _, tensor in _trees.leaves(value):
                if tensor.requires_grad:
                    found[id(tensor)] = tensor._version
    return found


def _leave_out_partial(
    asked: list[tuple[Listener, Visit]], output: Any
) -> list[tuple[Listener, Visit]]:
    """Drop those whose gradient would not be whole: of several outputs of a compiled graph.

    The graph may make one of another, and what it does so is not heard of outside.
    """
    if isinstance(output, Tensor) or not asked:
        return asked
    makers = [one.grad_fn for _, one in _trees.leaves(output)]
    graphs = [one for one in makers if type(one).__name__ == "CompiledFunctionBackward"]
    if len(set(graphs)) == len(graphs):
        return asked
    for listener, visit in asked:
        listener.no_gradient(visit, "output", None, "beside a graph")
    return []


def may_be_wired(
    listeners: list[Listener], frame: Frame, port: str, output: Any = None
) -> list[tuple[Listener, Visit]]:
    """List who can be promised gradients in this execution, with the visit they belong to."""
    asked = []
    enabled = torch.is_grad_enabled()
    visits = frame.visits
    for listener in listeners:
        visit = visits.get(listener.session)
        if visit is None or not listener.session.is_open:
            continue
        if visit.is_recompute:
            # The first pass of a reentrant checkpoint ran without grad: only its recompute has a
            # graph. Any other recompute is there for its values alone.
            original = visit.original
            if original is None or port in original.wired or not enabled:
                continue
            visit = original
        elif not enabled:
            listener.no_gradient(visit, port, None, "grad mode off")
            continue
        else:  # not in a recompute: a backward that comes again makes its graph anew
            if not visit.wired:
                visit.wired = set()
            visit.wired.add(port)
        asked.append((listener, visit))
    return asked if output is None else _leave_out_partial(asked, output)


def is_called_directly(running: FrameType) -> bool:
    """Tell whether a forward that runs was called by itself, not through its module's call."""
    frame = running.f_back
    while frame is not None:
        if frame.f_code is CALL_CODE:
            return False
        if frame.f_code is running.f_code:
            return True
        frame = frame.f_back
    return True
