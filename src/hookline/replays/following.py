"""The mode that follows non-finite values from operation to operation while a call is replayed.

An operation that gives something non-finite and was given nothing of it makes an event; what
carries it on inherits the event. So a value that is thrown away later, by a `where` say, does not
stand in the way of the one that is not, and a mask of -inf is followed without being blamed. No
tensor is kept: what is to be said of one is said when it is there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from hookline.addresses.pattern import escape
from hookline.hooks.operations import bind_operation, names_of
from hookline.replays.events import BAD, LOW, MASK, RAW, Event, Execution, Operation
from hookline.replays.explaining import explain
from hookline.replays.inner import InnerMode
from hookline.replays.looking import Look, describe, is_floating, look_at, storage_of
from hookline.replays.naming import (
    FILLING,
    FRESH,
    changed_in_place,
    is_intended,
    is_reflected,
    tensors_in,
)
from hookline.replays.nodes import NodeTies
from hookline.replays.places import (
    NO_LINE,
    Owner,
    SourceLine,
    find_function,
    find_line,
    find_owner,
)
from hookline.replays.staging import CannotReplay

_DEEP = ("scaled_dot_product_attention",)
"""Written in C, and still worth a look inside."""


class Follower(TorchFunctionMode):
    """See every operation of a replay, and follow what is not finite."""

    def __init__(
        self,
        names: Mapping[int, str],
        sources: Mapping[int, tuple[str, str]],
        *,
        ties: NodeTies | None = None,
        protected: frozenset[int] = frozenset(),
        start: SourceLine = NO_LINE,
    ) -> None:
        super().__init__()
        self._names = names
        """The paths of the modules, by id, without escapes; with the prefix of the model."""
        self._sources = sources
        """The cause and the address of tensors that are there from the start, by id."""
        self._ties = ties
        self._protected = protected
        self._start = start
        """The line that called the model: for operations that no other line calls."""
        self._made = 0
        """How many events there were."""
        self._marks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """The event that a tensor's non-finite elements come from."""
        self._running: list[Execution] = []
        self._direct: dict[int, Execution] = {}
        self._visits: dict[int, int] = {}
        self.events: list[Event] = []
        self.is_judging = True
        """Whether values are followed; in backward only nodes are tied."""

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Serve as the last forward pre hook of each module."""
        number = self._visits.get(id(module), 0)
        self._visits[id(module)] = number + 1
        self._running.append(Execution(module, number))

    def leave(self, module: nn.Module, output: Any) -> None:
        """Serve as the first forward hook, called also where the forward raised."""
        execution = Execution(module, 0)
        while self._running and (execution := self._running.pop()).module is not module:
            pass
        if self._ties is not None:
            path = escape(self._names.get(id(module), ""))
            maker = Operation("", "", path, NO_LINE, execution)
            self._ties.meet(tensors_in(output), maker, only_functions=True)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        names = names_of(func)
        target = changed_in_place(func, names, args, kwargs)
        if target is not None and self._protected and storage_of(target) in self._protected:
            raise CannotReplay(f"its forward writes to its own parameters (`{names[-1]}`)")
        operation = self._locate(names, sys._getframe(1))
        if self._ties is not None:
            self._ties.meet(tensors_in([*args, *kwargs.values()]), operation)
        if not self.is_judging:
            result = func(*args, **kwargs)
            bound = bind_operation(func, args, kwargs)
            self._tie(operation, bound, result, target)
            self._look_inside(operation, bound, result)
            return result
        bound = self._bind(func, args, kwargs, target)
        self._note_leaving(operation, bound)
        inner = None
        if inspect.isfunction(func) or operation.called in _DEEP:
            inner = InnerMode()
            with inner:
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._tie(operation, bind_operation(func, args, kwargs), result, target)
        self._judge(operation, bound, tensors_in(result) if target is None else [target], inner)
        return result

    def _tie(
        self,
        operation: Operation,
        bound: Mapping[str | int, Any],
        result: Any,
        target: Tensor | None,
    ) -> None:
        if self._ties is not None:
            outputs = tensors_in(result) if target is None else [target]
            self._ties.tie(outputs, operation, bound)

    def _look_inside(
        self, operation: Operation, bound: Mapping[str | int, Any], result: Any
    ) -> None:
        """Look at an operation that a backward calls: one written in Python shows its inside."""
        bad = [one for one in tensors_in(result) if is_floating(one) and not look_at(one).is_fine]
        given = [one for one in tensors_in(list(bound.values())) if is_floating(one)]
        if self._ties is not None and bad and all(look_at(one).is_fine for one in given):
            why = explain(operation.called, bound, bad[0], line=operation.line.text)
            self._ties.note_inside(why, operation.line.place)

    def _locate(self, names: tuple[str, ...], frame: Any) -> Operation:
        owner = find_owner(frame, self._names)
        execution = self._execution(owner)
        path = escape(self._names.get(id(owner.module), ""))
        index = -1
        if names and not owner.inside:
            for name in names:
                index = execution.counts.get(f"/{name}", 0)
                execution.counts[f"/{name}"] = index + 1
        called = names[-1] if names else ""
        line = find_line(frame)
        if self._ties is not None and owner.inside and self.is_judging:
            found = find_function(frame)
            if found is not None:
                applied = Operation(owner.inside, owner.inside, path, found[1], execution)
                self._ties.note_function(found[0], applied)
        if not line.file and self.is_judging:
            line = self._start
        return Operation(owner.inside or called, called, path, line, execution, index)

    def _execution(self, owner: Owner) -> Execution:
        top = self._running[-1] if self._running else None
        if top is not None and top.module is owner.module:
            return top
        known = self._direct.get(id(owner.module))
        if known is None or (owner.is_direct and known.frame != owner.frame):
            number = 0 if known is None else known.number + 1
            known = self._direct[id(owner.module)] = Execution(owner.module, number, owner.frame)
        return known

    def _bind(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor | None
    ) -> dict[str | int, Any]:
        """Name the arguments; what is written over is copied, to be looked at afterwards."""
        bound = bind_operation(func, args, kwargs)
        if is_reflected(func):
            bound = dict(reversed(bound.items()))
        if target is None or not is_floating(target):
            return bound
        if names_of(func)[-1] in FILLING or "out" in kwargs:
            return {name: value for name, value in bound.items() if value is not target}
        with torch._C.DisableTorchFunction(), torch.no_grad():
            copied = target.detach().clone()
        mark = self._marks.get(_base(target))
        if mark is not None:
            self._marks[copied] = mark
        return {name: copied if value is target else value for name, value in bound.items()}

    def _note_leaving(self, operation: Operation, bound: Mapping[str | int, Any]) -> None:
        """Note which events the arguments carry into another module than that of their making."""
        for one in tensors_in(list(bound.values())):
            event: Event | None = self._marks.get(_base(one))
            if event is not None:
                maker = event.operation.execution.module
                event.has_left = event.has_left or maker is not operation.execution.module

    def _judge(
        self,
        operation: Operation,
        bound: Mapping[str | int, Any],
        outputs: list[Tensor],
        inner: InnerMode | None,
    ) -> None:
        floats = [one for one in outputs if is_floating(one)]
        if operation.called in FRESH:
            for one in floats:
                event = self._number(Event(RAW, "nan", "operation", operation))
                event.why = "memory of torch.empty is used before it is filled"
                self._marks[_base(one)] = event
            return
        looks = [(one, look_at(one)) for one in floats]
        bad = [(one, look) for one, look in looks if not look.is_fine]
        if not bad:
            return
        made = self._attribute(operation, bound, bad, inner)
        for one, _ in bad:
            self._marks[_base(one)] = made

    def _attribute(
        self,
        operation: Operation,
        bound: Mapping[str | int, Any],
        bad: list[tuple[Tensor, Look]],
        inner: InnerMode | None,
    ) -> Event:
        """Give the event that non-finite outputs come from: one that is known, or a new one."""
        has_nan = any(look.nan for _, look in bad)
        has_posinf = any(look.posinf for _, look in bad)
        carried: list[Event] = []
        for one in tensors_in(list(bound.values())):
            if is_floating(one):
                look = look_at(one)
                if not look.is_fine:
                    carried.append(self._known(one, look, operation))
        carried.sort(key=lambda event: event.order)
        by_level = {event.level: event for event in reversed(carried)}
        for level in (BAD, RAW, LOW):
            event = by_level.get(level)
            if event is not None:
                if level != BAD and (has_nan or has_posinf):
                    self._make_bad(event)
                return event
        if MASK in by_level and not has_nan:
            return by_level[MASK]
        is_mask = not has_nan and is_intended(operation.called, _flat(bound.values()))
        if is_mask and not has_posinf:
            return Event(MASK, "inf", "operation", operation)
        event = self._new(operation, bound, *bad[0], inner)
        if is_mask:
            event.level = MASK
        elif not (has_nan or has_posinf):
            event.level = LOW
        else:
            self._make_bad(event)
        return event

    def _number(self, event: Event) -> Event:
        self._made += 1
        event.order = self._made
        return event

    def _make_bad(self, event: Event) -> None:
        if event.level != BAD or event not in self.events:
            event.level = BAD
            self.events.append(event)

    def _known(self, tensor: Tensor, look: Look, operation: Operation) -> Event:
        """Give the event of a non-finite tensor; one that no operation made gets its own."""
        event: Event | None = self._marks.get(_base(tensor))
        if event is not None:
            return event
        cause, site = self._sources.get(id(tensor), ("", ""))
        if not cause:
            cause, site = self._sources.get(id(_base(tensor)), ("", ""))
        event = self._number(Event(BAD, look.kind, cause or "input", operation, site))
        event.output = describe(tensor)
        if cause == "input":
            event.why = f"{_words(look)} was in the input already"
        elif cause:
            event.why = f"{_words(look)} was in it before the call"
        else:
            event.cause, event.site = "operation", operation.path
            event.why = (
                f"{operation.called} was given {_words(look)} that no operation of torch was seen "
                "to make: a constant, or code of another library"
            )
            event.operation = Operation(
                _maker(tensor), "", operation.path, operation.line, operation.execution
            )
        is_mask = not look.nan and (cause == "buffer" or not look.posinf)
        event.level = MASK if is_mask else BAD
        event.cause = "parameter" if cause == "buffer" else event.cause
        self._marks[_base(tensor)] = event
        if event.level == BAD:
            self.events.append(event)
        return event

    def _new(
        self,
        operation: Operation,
        bound: Mapping[str | int, Any],
        output: Tensor,
        look: Look,
        inner: InnerMode | None,
    ) -> Event:
        event = self._number(Event(BAD, look.kind, "operation", operation))
        event.output = describe(output)
        event.inputs = [
            describe(tensor, str(name) if one is tensor else f"{name}[{number}]")
            for name, one in bound.items()
            for number, tensor in enumerate(tensors_in(one))
        ]
        event.why = explain(operation.called, bound, output, line=operation.line.text)
        if inner is not None and inner.found is not None and inner.found.name != operation.called:
            if event.why.endswith("was given none"):
                event.why = f"{inner.found.why}, inside {operation.called}"
            else:
                event.evidence.append(f"inside it: {inner.found.why}")
        return event

    def trace(self, tensor: Tensor) -> Event | None:
        """Give the event that a tensor's non-finite elements come from, after the replay."""
        if look_at(tensor).is_fine:
            return None
        event: Event | None = self._marks.get(_base(tensor))
        if event is None:
            outside = Operation("", "", "", NO_LINE, Execution(None, 0))
            event = self._known(tensor, look_at(tensor), outside)
        return event


def _words(look: Look) -> str:
    return "NaN" if look.nan else "infinity"


def _maker(tensor: Tensor) -> str:
    """Name what made a tensor unseen: an autograd function has a node of its class."""
    node = tensor.grad_fn
    return "" if node is None else type(node).__name__.removesuffix("Backward")


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for one in values:
        found += _flat(one) if isinstance(one, (tuple, list)) else [one]
    return found


def _base(tensor: Tensor) -> Tensor:
    """Give the tensor whose memory a view shows."""
    with torch._C.DisableTorchFunction():
        base = tensor._base
        return tensor if base is None else base
