"""Variables inside a module's forward: where a rewritten copy of it hands each value over.

`hookline.sources` makes the copy; this file is what its taps call. A scope belongs to one
execution: it knows the frame of the visit and counts assignments in it. Where the compiler skips
the forward it would compile what that calls, so each tap is kept from it.
"""

from __future__ import annotations

import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling, is_exporting

from hookline._compiler import run_uncompiled
from hookline._errors import EditError
from hookline._torch import graph_task_id, is_functorch_active, top_saved_tensor_hooks
from hookline.hooks import checkpoints
from hookline.hooks.frames import Frame
from hookline.hooks.inside import Asked, flow
from hookline.hooks.refusals import refuse_tracing
from hookline.hooks.traced_inside import TracedFrame, TracedScope
from hookline.hooks.visits import Call, Listener, Visit

if TYPE_CHECKING:
    from hookline.hooks.junctions import Junction
    from hookline.hooks.plans import Plan

_NUMBERS = (int, float, bool, type(None))
_OWN = "__hl_"

Spots = tuple[str, ...]
"""The names of one variable: a function may be known by its own name and by the caller's."""


class Scope:
    """The variables of one function in one execution of a module."""

    __slots__ = ("frame", "junction", "names", "prefixes")

    def __init__(
        self, junction: Junction, frame: Frame, names: list[str | Spots], prefixes: Spots
    ) -> None:
        self.junction = junction
        self.frame = frame
        self.names = names
        self.prefixes = prefixes
        """What comes before the names of functions called here."""

    @run_uncompiled
    def assign(self, point: int, value: Any) -> Any:
        """Receive a value as it is assigned; give the one that is."""
        frame = self.frame
        counts = frame.counts
        plan = self.junction.plan.inside
        spots = self.names[point]
        if type(spots) is str and not frame.is_over:  # nearly always
            index = counts.get(spots, 0)
            counts[spots] = index + 1
            asked = plan.at(spots)
            if asked is None:
                return value
            if asked.has_edits:
                _note_regions(frame, spots, index)
            return flow(asked, frame, index, value)
        for spot in (spots,) if isinstance(spots, str) else spots:
            asked = plan.at(spot)
            index = counts.get(spot, 0)
            if frame.is_over:
                if asked is not None:
                    value = _assign_late(asked, frame, index, value)
                continue
            counts[spot] = index + 1
            if asked is not None:
                _note_regions(frame, spot, index)
                value = flow(asked, frame, index, value)
        return value


def log_value(listener: Listener, call: int, visit: int, port: str, value: Any) -> bool:
    """Note a value in a listener's log; false where it has to take more care of it."""
    log = listener.log
    if log is None:
        return False
    if type(value) is Tensor:
        if value.is_inference() or value.is_cuda or is_functorch_active():
            return False
        kept = value.detach()
        log.append((listener.place, call, visit, kept, kept._version, None, port))
    elif type(value) in _NUMBERS:
        log.append((listener.place, call, visit, value, 0, None, port))
    else:
        return False
    listener.fired += 1
    return True


Sink = tuple[Listener, Any, dict[int, str]]
"""The only one who keeps a variable, what stands for the module in its log, and the ports."""


class QuickScope:
    """Do what `Scope` does where one session keeps values, in a call of its model.

    Few functions and few objects: while a model runs, what Python needs is hardly ever in a cache.
    """

    __slots__ = ("call", "call_index", "counts", "frame", "index", "sinks", "taps")

    def __init__(self, taps: ForwardTaps, sinks: list[Sink | None], call: Call, index: int) -> None:
        self.taps = taps
        self.sinks = sinks
        self.call = call
        self.call_index = call.index
        self.index = index
        self.counts = [0] * len(sinks)
        self.frame: Frame | None = None

    @run_uncompiled
    def assign(self, point: int, value: Any) -> Any:
        """Receive a value as it is assigned, and pass it on."""
        sink, kind = self.sinks[point], type(value)
        if sink is not None and (kind is int or (kind is Tensor and not value.is_cuda)):
            # What `log_value` does, without the call.
            listener, place, ports = sink
            log, counts = listener.log, self.counts
            count = counts[point]
            port = ports.get(count)
            if log is not None and port is not None:
                kept, version = value, 0
                if kind is Tensor:
                    kept = value.detach()
                    try:
                        version = kept._version
                    except RuntimeError:  # an inference tensor
                        return self._assign_slowly(point, value)
                counts[point] = count + 1
                log.append((place, self.call_index, self.index, kept, version, None, port))
                listener.fired += 1
                return value
        return self._assign_slowly(point, value)

    def _assign_slowly(self, point: int, value: Any) -> Any:
        count = self.counts[point]
        self.counts[point] = count + 1
        plan = self.taps.junction.plan
        asked = plan.inside.at(self.taps.names[point])  # type: ignore[arg-type]
        if asked is None:
            return value
        if self.frame is None:
            visits = {
                session: Visit(station, self.call, self.index)
                for session, station in plan.stations
                if session.epoch is self.call.epoch
            }
            self.frame = Frame(self.taps.module, visits)
        return flow(asked, self.frame, count, value)


def _note_regions(frame: Frame, spot: str, index: int) -> None:
    """Note which assignment is the first in a checkpointed part of forward, for its recompute."""
    if top_saved_tensor_hooks(False) is None and torch.is_grad_enabled():
        return
    for region in checkpoints.recorded_regions():
        if frame.regions is None:
            frame.regions = weakref.WeakKeyDictionary()
        frame.regions.setdefault(region, {}).setdefault(spot, index)


def _number_again(frame: Frame, spot: str) -> int | None:
    """Give the number that an assignment had which is recomputed; None where it is not known."""
    region = checkpoints.recomputed_region()
    numbers = None if frame.regions is None else frame.regions.get(region)
    if numbers is None or spot not in numbers:
        return None
    turn = (graph_task_id(), spot)  # each backward pass repeats the region from its start
    done = numbers.get(turn, 0)
    numbers[turn] = done + 1
    return numbers[spot] + done


def _assign_late(asked: Asked, frame: Frame, index: int, value: Any) -> Any:
    """Receive a value of a function that outlives the forward: a recompute, or a generator."""
    if not checkpoints.is_recompute():
        frame.counts[asked.spot] = index + 1
        return flow(asked, frame, index, value)
    edits = asked.pick([one for one in asked.values if one.stage == 1])
    again = _number_again(frame, asked.spot)
    if again is not None:
        return flow(edits, frame, again, value)
    for one in edits.values:
        assert one.inside is not None
        if one.inside.number is not None or one.depends_on_place:
            raise EditError(
                f"the edit at `{one.address}` depends on the number of the assignment, and a part "
                "of forward is recomputed by a checkpoint that is not torch's: which assignment it "
                "is cannot be told. Edit all of them, or use torch.utils.checkpoint."
            )
    return flow(edits, frame, index, value)


class _Idle:
    """Stand for the scope of a forward that nobody listens to."""

    def assign(self, point: int, value: Any) -> Any:
        return value


_IDLE = _Idle()


@run_uncompiled
def iterate(scope: Callable[[int, Any], Any], shape: Any, iterable: Iterable[Any]) -> Iterator[Any]:
    """Hand over what a comprehension loops over, item by item."""
    items = iter(iterable)  # at once, as the comprehension itself would
    return (_put(scope, shape, item) for item in items)


def _put(scope: Callable[[int, Any], Any], shape: Any, item: Any) -> Any:
    if isinstance(shape, int):
        return scope(shape, item)
    if shape is None:
        return item
    parts = tuple(item)
    if len(parts) != len(shape):
        return parts  # unpacking says what is wrong
    return tuple([_put(scope, inner, part) for inner, part in zip(shape, parts, strict=True)])


def prefix_names(callee: Any, name: str, starts: Spots) -> Spots:
    """Give what comes before the names in a function: what it is called by, and its own name."""
    prefix, _, _ = name.rpartition(".")
    # The compiler of torch 2.11 knows the name of a method's function, and not of the method.
    function = callee.__func__ if isinstance(callee, types.MethodType) else callee
    own = getattr(function, "__name__", "")
    inside = f"{prefix}." if prefix else ""
    names = [name] if not own or f"{inside}{own}" == name else [name, f"{inside}{own}"]
    return tuple([f"{start}{one}." for start in starts for one in names])


class Taps:
    """What a rewritten function calls; one for each function."""

    def __init__(self, junction: Junction, prefixes: Spots, frame: Frame | None = None) -> None:
        self.junction = junction
        self.prefixes = prefixes
        self.frame = frame
        """The execution it belongs to, where it was handed over; else the one under way."""
        self.names: list[str | Spots] = []

    iterate = staticmethod(iterate)

    def name(self, table: tuple[str, ...]) -> None:
        """Learn which names the numbers in the rewritten function stand for."""
        spots = [tuple([f"@{prefix}{name}" for prefix in self.prefixes]) for name in table]
        self.names = [one[0] if len(one) == 1 else one for one in spots]

    @run_uncompiled
    def enter(self) -> Callable[[int, Any], Any]:
        """Begin a function that is no method."""
        if is_dynamo_compiling() or is_exporting():
            inside = self.junction.traced.look_inside()
            frame = inside.enter_callee()
            return TracedScope(inside, frame, self.names, prefixes=self.prefixes).assign
        frame = self.frame or self.junction.current()
        if frame is None:
            return _IDLE.assign
        assign: Callable[[int, Any], Any] = Scope(
            self.junction, frame, self.names, self.prefixes
        ).assign
        return assign

    @staticmethod
    @run_uncompiled
    def augment(name: str, left: Any, right: Any) -> Any:
        """Do what an augmented assignment does."""
        return getattr(operator, name)(left, right)

    @run_uncompiled
    def hand(self, scope: Callable[[int, Any], Any], name: str, callee: Any) -> Any:
        """Give the function to hand over in place of another one of which something is asked.

        It belongs to this execution, which may be over when it runs: in a recompute, say.
        """
        return self.call(scope, name, callee, is_handed=True)

    @run_uncompiled
    def call(
        self,
        scope: Callable[[int, Any], Any],
        name: str,
        callee: Any,
        *,
        is_handed: bool = False,
    ) -> Any:
        """Give the function to call in place of another one of which something is asked."""
        if is_dynamo_compiling() or is_exporting():
            traced: Any = scope
            prefixes = prefix_names(callee, name, traced.__self__.prefixes)
            return self.junction.callees.find_ready(callee, prefixes)
        inner = getattr(scope, "__self__", None)
        if not isinstance(inner, Scope):
            return callee
        prefixes = prefix_names(callee, name, inner.prefixes)
        frame = inner.frame if is_handed else None
        return self.junction.callees.replace(callee, prefixes, frame)

    @run_uncompiled
    def again(self, callee: Any) -> Any:
        """Give the function to call where one calls itself."""
        if is_dynamo_compiling() or is_exporting():
            return self.junction.callees.find_ready(callee, self.prefixes)
        return self.junction.callees.replace(callee, self.prefixes)

    @run_uncompiled
    def end(self, scope: Callable[[int, Any], Any]) -> None:
        """End a function; only a forward has to."""

    @run_uncompiled
    def clean(self, found: Any) -> Any:
        """Take the names of the taps out of what `locals()` or `dir()` gave."""
        if isinstance(found, dict):
            return {name: value for name, value in found.items() if not name.startswith(_OWN)}
        return [name for name in found if not name.startswith(_OWN)]

    @run_uncompiled
    def begin(self, this: Any) -> tuple[Any, Callable[[int, Any], Any]]:
        """Begin a method."""
        return this, self.enter()


class ForwardTaps(Taps):
    """What a rewritten forward calls."""

    def __init__(self, junction: Junction, module: nn.Module, takes_self: bool) -> None:
        super().__init__(junction, ("",))
        self.module = module
        self.takes_self = takes_self
        """Whether it is bound to the module; not where the module had a forward of its own."""
        self.sinks: tuple[Plan | None, list[Sink | None]] = (None, [])
        """A plan, and who keeps each variable by it, where it is one; other threads read it too."""

    @run_uncompiled
    def begin(self, this: Any) -> tuple[Any, Callable[[int, Any], Any]]:
        junction = self.junction
        quick = junction.quick
        if is_dynamo_compiling() or is_exporting():
            return this, self._begin_traced(this)
        is_plain = this is self.module and graph_task_id() == -1 and not is_functorch_active()
        if quick is not None and is_plain:
            session, station = quick
            call = session.active.get(get_ident())
            if call is not None and call.depth:
                visits = call.counts
                index = visits.get(station, 0)
                visits[station] = index + 1
                station.runs += 1
                plan, sinks = self.sinks
                if junction.plan is not plan:
                    sinks = self._find_sinks(junction.plan)
                return this, QuickScope(self, sinks, call, index).assign
        if not self.takes_self:
            return this, self.enter()
        if this is not self.module and "_is_replica" not in this.__dict__:
            for name in ("forward", "__getstate__", "_replicate_for_data_parallel"):
                this.__dict__.pop(name, None)  # a copy of the module took these along
            return this, _IDLE.assign
        begin = junction.begin_alone if junction.is_hookless else self._find
        frame = begin(this, sys._getframe(1))
        if not frame.visits:
            return frame.module, _IDLE.assign
        return frame.module, Scope(junction, frame, self.names, self.prefixes).assign

    def _begin_traced(self, this: Any) -> Callable[[int, Any], Any]:
        """Begin an execution where the compiler looks on."""
        junction = self.junction
        if junction.lazy is not None or (self.takes_self and this is not self.module):
            refuse_tracing()
        inside = junction.traced.look_inside()
        if junction.quick is not None:  # it does not call itself, or others of which it is asked
            junction.traced.begin_beside()
            return TracedScope(inside, TracedFrame([]), self.names).assign
        is_alone = junction.is_hookless or not inside.frames
        if is_alone:
            junction.traced.begin_beside()
            inside.enter([])
        return TracedScope(inside, inside.frames[-1], self.names, is_alone=is_alone).assign

    def _find_sinks(self, plan: Plan) -> list[Sink | None]:
        sinks: list[Sink | None] = []
        for spot in self.names:
            asked = plan.inside.at(spot) if isinstance(spot, str) else None
            if asked is None or asked.only is None:
                sinks.append(None)
            else:
                sinks.append((asked.only, asked.only.place, asked.ports))
        self.sinks = (plan, sinks)
        return sinks

    @run_uncompiled
    def enter(self) -> Callable[[int, Any], Any]:
        if is_dynamo_compiling() or is_exporting():
            return self._begin_traced(self.module)
        frame = self._find(self.module, sys._getframe(1))
        if not frame.visits:
            return _IDLE.assign
        assign: Callable[[int, Any], Any] = Scope(
            self.junction, frame, self.names, self.prefixes
        ).assign
        return assign

    def _find(self, _: nn.Module, running: types.FrameType) -> Frame:
        junction = self.junction
        frame = (junction.wake(running) if junction.lazy else None) or junction.current()
        if frame is None:
            # Called by itself: only its own frame knows what it was called with.
            given = tuple(running.f_locals.values()) if junction.plan.inside.has_gradients else ()
            frame = junction.begin_directly(given, {})
        return frame

    @run_uncompiled
    def end(self, scope: Callable[[int, Any], Any]) -> None:
        inner = scope.__self__  # type: ignore[attr-defined]
        if is_dynamo_compiling() or is_exporting():
            inner.end()
            return
        if type(inner) is Scope and inner.frame.depth:
            inner.junction.end_alone(inner.frame)
