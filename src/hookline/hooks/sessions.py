"""A session owns everything one caller attached to one model, and counts calls and visits.

It opens once, closes once or many times, and leaves the model as it was. Closing takes effect at
once, also for gradients of a forward that has already run, with one exception: a value edit made
inside a checkpointed region is repeated while that region is recomputed, because the gradient
would be wrong without it.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from threading import RLock, get_ident
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn

from hookline._compiler import is_compile_forced_eager, is_compiled
from hookline._errors import SessionError, UnsupportedModel
from hookline._torch import top_saved_tensor_hooks
from hookline.addresses import ModuleTree
from hookline.addresses.names import Trails
from hookline.hooks import checkpoints
from hookline.hooks.aliases import Audit
from hookline.hooks.compiled import may_be_traced, prepare_compiler
from hookline.hooks.eagerly import stance
from hookline.hooks.frames import CALL_CODE
from hookline.hooks.junctions import Junction
from hookline.hooks.parameters import LazyStart, ParameterListener
from hookline.hooks.reducing import Reductions, find_reductions
from hookline.hooks.refusals import attachable, refuse_module, refuse_running
from hookline.hooks.uncompiled import outside_of_graphs
from hookline.hooks.visits import Call, Listener, Station, Visit

_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class _Region:
    """What a session knows of one checkpointed region: its visits, in order."""

    __slots__ = ("is_edited", "progress", "visits")

    def __init__(self) -> None:
        self.visits: dict[Station, list[Visit]] = {}
        self.progress: dict[tuple[Station, int], int] = {}
        self.is_edited = False


_attaching = RLock()
"""Held while something is put on modules or taken away: two threads may do so at once."""


class Session:
    """Attach listeners to a model, count its calls, and take everything away again."""

    _sequence: ClassVar = itertools.count(1)

    hears_leaving = False
    """Whether its listeners inside a forward are to be told when that is over."""

    is_eager = False
    """Whether compiled models run without their graphs while it is open."""

    is_lasting = False
    """Whether it stays for long, so that it is ready for a compiler that may come."""

    needs_visits = True
    """Whether its listeners ask which execution a value is of, also inside compiled graphs."""

    reductions: Reductions | None = None
    """What reduces the gradients of the parameters that it follows, where ranks do so."""

    parameter_order: tuple[int, int] = (2, 0)
    """When its parameters get their turn as a call begins, as listeners do at one site."""

    def __init__(
        self,
        model: nn.Module | ModuleTree,
        purpose: str,
        *,
        this_thread: bool = False,
        is_eager: bool = False,
    ) -> None:
        self.tree: ModuleTree | None = model if isinstance(model, ModuleTree) else attachable(model)
        self.purpose = purpose
        self.is_open = False
        self.is_lingering = False
        self.is_reusable = False
        """Whether it may be opened again after it was closed."""
        self.epoch: object | None = None
        """What tells one opening from another; None while closed."""
        self.follows_recompute = True
        """Whether listeners are called when checkpointing runs the forward again."""
        self.other_thread_calls = 0
        self.calls = 0
        self._call_numbers = itertools.count()
        self._this_thread = this_thread
        self._thread: int | None = None
        self._listeners: dict[Station, list[Listener]] = {}
        self._stations: dict[int, Station] = {}
        self.is_eager = is_eager
        self._regions_compiled: list[tuple[str, bool]] = []
        """Paths where compiled graphs begin, and whether the module there is inside itself."""
        self.trails = Trails(self.tree, self._check)
        """The way to each station, to notice modules that are exchanged."""
        self._junctions: list[tuple[Junction, nn.Module]] = []
        self._parameters: list[ParameterListener] = []
        self._at_detach: list[Callable[[], None]] = []
        self.audits: list[Audit] = []
        """Who watches over outputs that must not have changed when the root returns."""
        self.active: dict[int, Call] = {}
        """The call under way, or the latest, by thread."""
        self._latest: Call | None = None
        self._regions: weakref.WeakKeyDictionary[Any, _Region] = weakref.WeakKeyDictionary()
        root = self.tree.find("")
        assert root is not None
        station = self._stations[id(root.module)] = Station(root.names, root.module, True)
        self._listeners[station] = []
        self.trails.add("")

    def __repr__(self) -> str:
        return self.purpose

    @property
    def may_fuse(self) -> bool:
        """Tell whether torch may run parts of the model as one kernel, if no hook is there."""
        tree = self.tree
        return tree is not None and any(issubclass(kind, _FUSED) for kind in tree.facts.kinds)

    @property
    def stations(self) -> list[Station]:
        """List the modules this session listens at, the root always among them."""
        return list(self._stations.values())

    @property
    def listeners(self) -> list[Listener]:
        """List everything asked of this session."""
        return [one for group in self._listeners.values() for one in group]

    @property
    def parameters(self) -> list[ParameterListener]:
        """List the parameters this session follows."""
        return list(self._parameters)

    def station(
        self, names: tuple[str, ...], module: nn.Module, *, is_inside: bool = False
    ) -> Station:
        """Give this session's station at a module, or inside its forward."""
        station = self._stations.get(id(module))
        if not is_inside and (station is None or station.is_root):
            refuse_module(module, names[0])
        if station is None:
            self.trails.add(names[0])
            station = self._stations[id(module)] = Station(names, module, False)
            self._listeners[station] = []
        return station

    def _check(self, module: nn.Module, path: str) -> None:
        """Look at a module on the way to a station."""
        refuse_running(module, path)
        if is_compiled(module):
            self._regions_compiled.append((path, module._compiled_call_impl is not None))

    @property
    def is_compiled(self) -> bool:
        """Tell whether any of its modules was given to the compiler, as far as is known."""
        return bool(self._regions_compiled)

    def begins_graph(self, station: Station) -> bool:
        """Tell whether calling a station's module runs a compiled graph, if hooks on it run now."""
        is_start = any(path == station.path for path, _ in self._regions_compiled)
        return is_start and not is_compile_forced_eager()

    def is_in_graph(self, station: Station) -> bool:
        """Tell whether a station's module runs inside a compiled graph, as far as is known."""
        path = station.path
        for start, has_start in self._regions_compiled:
            if path == start:
                if has_start:
                    return True
            elif not start or path.startswith(f"{start}."):
                return True
        return False

    def listen(self, listener: Listener, *, prepend: bool = False) -> None:
        """Add a listener; before the session opens."""
        number = next(Session._sequence)
        listener.sequence = -number if prepend else number
        self._listeners[listener.station].append(listener)

    def follow_parameter(self, listener: ParameterListener, *, prepend: bool = False) -> None:
        """Add a parameter to follow; before the session opens."""
        number = next(Session._sequence)
        listener.order = self.parameter_order = (listener.stage, -number if prepend else number)
        self._parameters.append(listener)
        self._parameters.sort(key=lambda one: one.order)
        if listener.site.is_grad and not listener.is_lazy:
            return
        assert self.tree is not None
        for owner, _ in listener.places:  # its value is taken when a call begins: notice calls
            entry = self.tree.entry_of(owner)
            if entry is not None:
                station = self.station(entry.names, owner)
                if listener.is_lazy:
                    self.listen(LazyStart(listener, station))

    def when_detached(self, callback: Callable[[], None]) -> None:
        """Run something when the last of this session leaves the model."""
        self._at_detach.append(callback)

    def latest_call(self) -> Call:
        """Give the call that began last, or one for what ran before any."""
        if self._latest is None:
            self._latest = Call(0, get_ident(), True, self.epoch)
        return self._latest

    def open(self) -> None:
        """Attach everything."""
        if self.is_open or self.tree is None:
            raise SessionError(f"{self.purpose} is already open or was closed; make a new one.")
        if self.is_eager:
            stance.refuse_inside()
        self._thread = get_ident() if self._this_thread else None
        self.epoch = object()
        self.calls = 0
        self._call_numbers = itertools.count()
        with _attaching:
            try:
                if self.is_lasting or may_be_traced():
                    prepare_compiler()  # it may have come since this was open before
                for station in self._stations.values():
                    self._attach(station)
                    if self._regions_compiled and not self.is_eager:
                        self._refuse_in_graph(station)
            except BaseException:
                self._detach()
                raise
        self.is_open = True
        if self._parameters:
            self.reductions = find_reductions(self.tree)
        for parameter in self._parameters:
            parameter.attach()
        if self.is_eager:
            stance.take()

    def _refuse_in_graph(self, station: Station) -> None:
        """Raise at once for what would be refused when the graph is traced."""
        junction = self._junctions[-1][0]
        refusal = "" if junction.wiring is None else junction.wiring.refusal
        if refusal and self.is_in_graph(station) and not is_compile_forced_eager():
            raise UnsupportedModel(refusal)

    def _attach(self, station: Station) -> None:
        module = station.module
        station.runs = 0
        # Where others listen already theirs serves; a session of its own keeps its junction ready.
        is_taken = module._forward_hooks or "__getstate__" in module.__dict__
        junction = Junction.find(module) if is_taken else None
        if junction is None:
            junction = station.junction
            if junction is None:
                junction = station.junction = Junction(module)
                junction.join(self, station, self._listeners[station])
            self._junctions.append((junction, module))
            junction.install(module)
        else:
            self._junctions.append((junction, module))
            junction.join(self, station, self._listeners[station])

    def close(self) -> None:
        """Take everything away; does nothing the second time."""
        if not self.is_open:
            return
        self.is_open = False
        if self.is_eager:
            stance.leave()
        self.epoch = None
        self.active.clear()
        for parameter in self._parameters:
            parameter.detach()
        waiting = []
        if self._regions:
            waiting = [region for region, known in self._regions.items() if known.is_edited]
        if not waiting:
            self._detach()
            return
        self.is_lingering = True
        for junction, _ in self._junctions:
            junction.keep_edits(self)
        for region in waiting:
            weakref.finalize(region, _region_gone, weakref.ref(self)).atexit = False

    def release(self) -> None:
        """Detach if no checkpointed region waits for its backward any more."""
        if self.is_lingering and not any(known.is_edited for known in self._regions.values()):
            self._detach()

    def _detach(self) -> None:
        self.is_lingering = False
        for callback in self._at_detach:
            callback()
        self._at_detach.clear()
        with _attaching:
            for junction, module in self._junctions:
                junction.leave(self, module)
            self._junctions.clear()
        self._latest = None
        if not self.is_reusable:
            self.dispose()

    def dispose(self) -> None:
        """Let go of the model; the session cannot be opened again."""
        self.is_reusable = False
        if self.is_open or self.is_lingering:
            return  # closing will come back here
        for station in self._stations.values():
            if station.junction is not None:
                station.junction.dispose()
                station.junction = None
        self._parameters.clear()
        self._listeners.clear()
        self._stations.clear()
        self.trails = None  # type: ignore[assignment]
        self.tree = None

    # Calls and visits. Everything below runs for each execution of a station's module.

    def begin(self, station: Station, thread: int, task: int, traced: int = 0) -> Visit | None:
        """Count an execution of a module; None when this session does not follow it."""
        if task != -1 and checkpoints.is_recompute():
            return self._begin_again(station, task) if self.follows_recompute else None
        call = self.active.get(thread)
        if not self.is_open:
            return None
        if self._thread is not None and thread != self._thread:
            self.other_thread_calls += 1
            return None
        if station.is_root:
            if call is None or call.depth == 0 or not _is_nested(station.module, traced):
                call = self._start_call(thread, is_implicit=False)
            call.depth += 1
        elif call is None or (call.depth == 0 and not call.is_implicit):
            call = self._start_call(thread, is_implicit=True)
        elif call.is_implicit and self._parameters:  # no call begins: look at each execution
            for parameter in self._parameters:
                if any(owner is station.module for owner, _ in parameter.places):
                    parameter.on_call(call)
        counts = call.counts
        index = counts.get(station, 0)
        counts[station] = index + 1
        station.runs += 1
        visit = Visit(station, call, index)
        if self.follows_recompute and (
            top_saved_tensor_hooks(False) is not None or not torch.is_grad_enabled()
            if call.grad_at_start
            else call.in_region
        ):
            self._note_regions(visit)
            if any(True for _ in self._edited_parameters(station)):
                self.note_edit(visit)
        return visit

    def end_root(self, call: Call) -> None:
        """Learn that an execution of the root ended."""
        for parameter in self._parameters:
            parameter.on_return()
        if call.depth:
            call.depth -= 1
            if self.audits and not call.depth:
                audits, self.audits = self.audits, []
                for audit in audits:
                    audit.refuse_change()

    def note_edit(self, visit: Visit) -> None:
        """Learn that a value was changed in this visit: its checkpointed region needs it again."""
        for known in (visit.original or visit).regions:
            known.is_edited = True

    def note_inside_edit(self, visit: Visit) -> None:
        """Learn that a value inside a forward was changed: regions that began there count too."""
        self.note_edit(visit)
        if top_saved_tensor_hooks(False) is not None or not torch.is_grad_enabled():
            for region in checkpoints.recorded_regions():
                self._regions.setdefault(region, _Region()).is_edited = True

    def is_in_own_region(self, visit: Visit) -> bool:
        """Tell whether a checkpointed region began inside the forward of this visit."""
        if top_saved_tensor_hooks(False) is None and torch.is_grad_enabled():
            return False
        known = (visit.original or visit).regions
        return any(
            self._regions.get(region) not in known for region in checkpoints.recorded_regions()
        )

    def _start_call(self, thread: int, *, is_implicit: bool) -> Call:
        before = self.active.get(thread)
        if before is not None and (before.depth or before.is_implicit):
            for junction, _ in self._junctions:  # what an interrupted call left behind
                if junction.frames.get(thread):
                    junction.forget_frames(self, thread)
        number = next(self._call_numbers)  # not `self.calls`: other threads begin calls too
        call = Call(number, thread, is_implicit, self.epoch)
        if self.follows_recompute and not call.grad_at_start:
            call.in_region = bool(checkpoints.recorded_regions())
        self.calls = max(self.calls, number + 1)
        self.active[thread] = self._latest = call
        for parameter in self._parameters:
            parameter.on_call(call)
        return call

    def _note_regions(self, visit: Visit) -> None:
        for region in checkpoints.recorded_regions():
            known = self._regions.get(region)
            if known is None:
                known = self._regions[region] = _Region()
            known.visits.setdefault(visit.station, []).append(visit)
            visit.regions = (*visit.regions, known)

    def _begin_again(self, station: Station, task: int) -> Visit | None:
        """Find the visit that a recompute repeats."""
        region = checkpoints.recomputed_region()
        known = None if region is None else self._regions.get(region)
        originals = () if known is None else known.visits.get(station, ())
        if known is None or not originals:
            if self.is_lingering or self._latest is None:
                return None
            visit = Visit(station, self._latest, None)
        else:
            turn = known.progress.get((station, task), 0)
            known.progress[station, task] = turn + 1
            original = originals[min(turn, len(originals) - 1)]
            visit = Visit(station, original.call, original.index)
            visit.original = original
            for inner in checkpoints.recorded_regions():  # a checkpoint inside a checkpoint
                fresh = self._regions.setdefault(inner, _Region())
                fresh.visits.setdefault(station, []).append(original)
                fresh.is_edited = fresh.is_edited or known.is_edited
        visit.is_recompute = True
        # The parameters as this call had them: by now they may be another call's, or put back.
        visit.undo = [one.redo(visit.call) for one in self._edited_parameters(station)]
        return visit

    def end_again(self, visit: Visit) -> None:
        """Learn that a recompute of a module ended."""
        for undo in reversed(visit.undo):
            undo()
        visit.undo = []

    def _edited_parameters(self, station: Station) -> Iterator[ParameterListener]:
        for parameter in self._parameters:
            if parameter.edits_value and any(o is station.module for o, _ in parameter.places):
                yield parameter


def _region_gone(session: weakref.ref[Session]) -> None:
    alive = session()
    if alive is not None:
        alive.release()


def _is_nested(root: nn.Module, seen: int) -> bool:
    """Tell whether the root really runs inside itself, or an earlier call was interrupted."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and seen < 2:
        seen += frame.f_code is CALL_CODE and frame.f_locals.get("self") is root
        frame = frame.f_back
    return seen >= 2


class Handle:
    """What attaching returns: removes everything it attached, once or many times."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def is_live(self) -> bool:
        """Tell whether the hooks are attached."""
        return self._session.is_open

    @outside_of_graphs
    def remove(self) -> None:
        """Remove everything this handle attached, at once; does nothing the second time."""
        self._session.close()

    def __enter__(self) -> Handle:
        return self

    @outside_of_graphs
    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "live" if self.is_live else "removed"
        return f"<hookline.Handle: {self._session.purpose}, {state}>"
