"""The one pre hook and one post hook that hookline puts on a module, whatever is asked there.

What is asked inside its forward makes the junction exchange that too, through a stand-in.

All sessions that listen at a module share its junction, so that their order is one order: first
those that want to see values before edits, then edits as they were attached, then those that see
what flows on. The junction lives in the module's own hook dictionaries and nowhere else; when the
last session leaves, both hooks go.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from hookline import _trees
from hookline._compiler import has_compiled_code
from hookline._torch import (
    add_forward_hooks,
    graph_task_id,
    is_functorch_active,
    move_forward_hooks_last,
    remove_forward_hooks,
    set_forward_pre_hook,
)
from hookline.addresses.variables import forward_of, has_forward
from hookline.hooks import aliases, gradients
from hookline.hooks.arguments import bind, unbind
from hookline.hooks.callees import Callees
from hookline.hooks.compiled import UNREADY, Wiring, may_be_traced, prepare_compiler
from hookline.hooks.forwards import Skipping, StandIn
from hookline.hooks.frames import Frame, is_called_directly, may_be_wired, versions
from hookline.hooks.inside import NOTHING_INSIDE, settle
from hookline.hooks.module_hooks import PostHook, PreHook
from hookline.hooks.plans import NOTHING, Plan
from hookline.hooks.refusals import generator_kind
from hookline.hooks.visits import Listener, Station, Visit
from hookline.sources import read, ways_back

if TYPE_CHECKING:
    from hookline.hooks.sessions import Session


class Junction:
    """Dispatch one module's calls to the sessions that listen there."""

    __slots__ = (
        "_callees",
        "_has_pre_hook",
        "_key",
        "_listeners",
        "_stand_in",
        "_stations",
        "frames",
        "is_hookless",
        "is_installed",
        "lazy",
        "looks",
        "module",
        "own_code",
        "plan",
        "quick",
        "ran",
        "traced",
        "wiring",
    )

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._stations: list[tuple[Session, Station]] = []
        self._listeners: list[Listener] = []
        self._key = -1
        self._has_pre_hook = False
        self._stand_in: StandIn | None = None
        self.plan = NOTHING
        self.is_installed = False
        self.is_hookless = False
        """Whether a rewritten forward announces its executions itself, for less than hooks cost."""
        self.quick: tuple[Session, Station] | None = None
        """The one session that keeps values of variables here, if nothing else has to be known."""
        self.frames: dict[int, list[Frame]] = {}
        self._callees: Callees | None = None
        self.own_code: CodeType | None = None
        """The code of the forward that runs, rewritten or not."""
        self.lazy: dict[FrameType, Frame] | None = None
        """Where forward is a generator: what was begun, by the Python frame that will run it."""
        self.ran: set[str] = set()
        """The operations that the module's own forward was seen to call, none of them asked for."""
        self.wiring: Wiring | None = None
        """Who hears for the listeners inside compiled graphs; None where there can be none."""
        self.traced: Any = UNREADY
        """What the compiler traces in the place of the hooks."""
        self.looks: dict[str, int] = {}
        """How often it was looked up whose an operation is."""

    @staticmethod
    def find(module: nn.Module) -> Junction | None:
        """Give the junction that is on a module, moved behind hooks that were added since."""
        for hook in module._forward_hooks.values():
            if type(hook) is PostHook:
                move_forward_hooks_last(module, hook.junction._key)
                return hook.junction
        stand_in = StandIn.find(module)
        return None if stand_in is None else stand_in.junction

    def install(self, module: nn.Module) -> None:
        """Put on a module what it takes to know of its executions."""
        self.is_installed = True
        self._stand()

    def _stand(self) -> None:
        """Exchange the module's forward if something inside it is asked for, or back; hooks too."""
        inside = self.plan.inside
        self.wire()
        if self._stand_in is None and (inside.variables or inside.operations):
            self._stand_in = StandIn(self, self.module)
            self.lazy = {} if generator_kind(self.module) is not None else None
        self.is_hookless = (
            self.plan.only_variables
            and self._stand_in is not None
            and self._stand_in.may_do_without_hooks
            and not any(session.may_fuse for session, _ in self._stations)
        )
        self.quick = self.plan.values_inside if self.is_hookless and self._is_plain() else None
        if self.is_hookless:
            self._unhook()
        else:
            is_light = self.plan.light is not None and self.plan.light[2].is_light
            if self._key == -1:
                pre = None if is_light else PreHook(self)
                self._key = add_forward_hooks(self.module, pre, PostHook(self))
                self._has_pre_hook = not is_light
            self.need_pre_hook(not is_light, is_new=True)
        if self._stand_in is None and self.must_be_noticed:
            self._stand_in = StandIn(self, self.module)
        if self._stand_in is not None:
            self._stand_in.update()

    @property
    def must_be_noticed(self) -> bool:
        """Whether there is a graph of the module, or will be, that was compiled without hooks.

        It would go on without them, in silence. But it knows that the module has no forward of its
        own, and is left alone when it has one.
        """
        is_known = has_compiled_code() or any(one.is_compiled for one, _ in self._stations)
        return is_known and has_forward(self.module)

    def wire(self) -> None:
        """Make ready to be traced, where that can happen."""
        sessions = [session for session, _ in self._stations]
        if may_be_traced() or any(one.is_lasting for one in sessions):
            if self.wiring is None or not self.wiring.serves(self.module, self.plan):
                prepare_compiler()  # what is made now counts on it, if it is there
                self.wiring = Wiring(self.module, self.plan, self.frames, previous=self.wiring)
                self.traced = self.wiring.traced
        else:
            self.wiring, self.traced = None, UNREADY

    def need_pre_hook(self, is_needed: bool, *, is_new: bool = False) -> None:
        """Have the pre hook on the module, or do without, in which case the other is short too."""
        if self._key == -1:
            return
        if is_needed != self._has_pre_hook:
            set_forward_pre_hook(self.module, self._key, PreHook(self) if is_needed else None)
            self._has_pre_hook = is_needed
        light, post = self.plan.light, cast("PostHook", self.module._forward_hooks[self._key])
        post.shown, post.asked = self.traced.shown, self.traced.asked
        if is_needed or is_new or light is None:
            post.hear = None
        is_free = not is_needed and not any(self.frames.values())  # none began the longer way
        if is_free and light is not None and post.hear is None:
            post.hear = self.plan.light_ear()

    def _is_plain(self) -> bool:
        """Tell whether no frame is needed: no edits, no ends, no other functions, no recursion."""
        inside = self.plan.inside
        if inside.needs_end or any(one.stage == 1 for one in inside.listeners):
            return False
        reading = read(forward_of(self.module))
        own = {one.name for one in reading.points if "." not in one.name or one.kind == "attribute"}
        called = None if self.wiring and "self" in reading.called else ways_back(reading)
        if called is None or not inside.variables <= own:
            return False
        kind = type(self.module)
        return not any(inspect.isroutine(getattr(kind, name, None)) for name in called)

    def _unhook(self) -> None:
        if self._key != -1:
            remove_forward_hooks(self.module, self._key)
            self._key = -1

    def add_skip(self, skip: Skipping) -> Callable[[], None]:
        """Let something answer in the place of the module; give what ends that."""
        if self._stand_in is None:
            self._stand_in = StandIn(self, self.module)
        stand_in = self._stand_in
        stand_in.skips.append(skip)
        stand_in.update()

        def remove() -> None:
            stand_in.skips.remove(skip)
            stand_in.update()

        return remove

    def join(self, session: Session, station: Station, listeners: list[Listener]) -> None:
        """Let a session listen here."""
        self._stations = [*self._stations, (session, station)]
        self._listeners = [*self._listeners, *listeners]
        self.plan = Plan(self._stations, self._listeners)
        if self.is_installed:
            self._stand()

    def leave(self, session: Session, module: nn.Module) -> None:
        """Forget a session; remove the hooks with the last one."""
        others = [pair for pair in self._stations if pair[0] is not session]
        if others:
            for _, station in self._stations:
                station.junction = None  # it serves others too now
            self._stations = others
            self._listeners = [one for one in self._listeners if one.session is not session]
            self.plan = Plan(self._stations, self._listeners)
            self._stand()
            return
        self._unhook()
        self.is_installed = False
        self.quick = None
        if self._stand_in is not None:
            self._stand_in.restore()
        self.frames.clear()
        if not session.is_reusable:
            self.dispose()

    def dispose(self) -> None:
        """Let go of everything; without cycles, so that a model is freed at once."""
        self._stations, self._listeners, self.plan = [], [], NOTHING
        if self._stand_in is not None:
            self._stand_in.dispose()
        self._stand_in = self._callees = self.lazy = self.quick = self.wiring = None
        self.traced = UNREADY

    @property
    def callees(self) -> Callees:
        """Give the rewritten copies of functions that the module's forward calls."""
        if self._callees is None:
            self._callees = Callees(self)
        return self._callees

    def keep_edits(self, session: Session) -> None:
        """Drop all of a session's listeners here but those that edit values."""
        self._listeners = [
            one
            for one in self._listeners
            if one.session is not session or (one.stage == 1 and one.values)
        ]
        self.plan = Plan(self._stations, self._listeners)
        self._stand()

    def forget_frames(self, session: Session, thread: int) -> None:
        """Drop executions that a session knows to have ended; others' may be under way."""
        stack = self.frames[thread]
        stack[:] = [frame for frame in stack if session not in frame.visits]

    def sessions(self) -> list[Session]:
        """List who listens here."""
        return [session for session, _ in self._stations]

    def listeners(self) -> list[Listener]:
        """List what is asked here."""
        return self._listeners

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run before the module's forward."""
        thread = get_ident()
        task = graph_task_id()
        plan = self.plan
        frame = self._begin(module, thread, task)
        visits = frame.visits
        stack = self.frames.get(thread)
        if stack is None:
            stack = self.frames[thread] = []
        stack.append(frame)
        if not visits:
            return None
        if plan.inside.has_gradients or plan.output_gradients:
            frame.received = versions(args, kwargs)
        if not (plan.inputs or plan.input_gradients):
            return None
        before_args, before_kwargs = args, kwargs
        for listener in plan.inputs:
            one = visits.get(listener.session)
            if one is not None:
                args, kwargs = listener.on_input(one, module, args, kwargs)
        if plan.input_gradients:
            args, kwargs = self._tap_inputs(plan, frame, module, args, kwargs)
        if frame.received or plan.inside.has_gradients or plan.output_gradients:
            frame.received = versions(args, kwargs)
        if args is before_args and kwargs is before_kwargs:
            return None
        return args, kwargs

    def _begin(self, module: nn.Module, thread: int, task: int) -> Frame:
        inside = self.plan.values_inside
        if inside is not None and task == -1:  # a short way, inside a call of the only session
            session, station = inside
            call = session.active.get(thread)
            if call is not None and call.depth:
                counts = call.counts
                index = counts.get(station, 0)
                counts[station] = index + 1
                station.runs += 1
                return Frame(module, {session: Visit(station, call, index)})
        visits = {}
        for session, station in self.plan.stations:
            visit = session.begin(station, thread, task)
            if visit is not None:
                visits[session] = visit
        return Frame(module, visits)

    def current(self) -> Frame | None:
        """Give the innermost execution of the module that is under way in this thread."""
        stack = self.frames.get(get_ident())
        return stack[-1] if stack else None

    def wake(self, running: FrameType) -> Frame | None:
        """Give the execution that a generator belongs to, now that its body runs."""
        frame = None if self.lazy is None else self.lazy.pop(running, None)
        if frame is not None:
            frame.is_over = False
        return frame

    def begin_alone(self, module: nn.Module, running: FrameType) -> Frame:
        """Begin an execution that a rewritten forward announces itself; it calls `end_alone`."""
        thread, task = get_ident(), graph_task_id()
        stack = self.frames.get(thread)
        if stack is None:
            stack = self.frames[thread] = []
        elif stack and stack[-1].depth and is_called_directly(running):
            frame = stack[-1]  # forward calls itself: still the same visit
            frame.depth += 1
            return frame
        frame = self._begin(module, thread, task)
        if frame.visits:
            frame.depth = 1
            stack.append(frame)
            if self.plan.inside.needs_end:
                frame.error_before = sys.exc_info()[1]
        return frame

    def end_alone(self, frame: Frame) -> None:
        """End what `begin_alone` began."""
        frame.depth -= 1
        if frame.depth:
            return
        frame.is_over = True
        stack = self.frames.get(get_ident())
        if stack and stack[-1] is frame:
            stack.pop()
        inside = self.plan.inside
        if inside.needs_end and sys.exc_info()[1] is frame.error_before:  # it did not raise
            settle(inside, frame)

    def begin_directly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        """Begin an execution of which the hooks do not know: forward was called by itself."""
        frame = self._begin(self.module, get_ident(), graph_task_id())
        if self.plan.inside.has_gradients:
            frame.received = versions(args, kwargs)
        return frame

    @contextmanager
    def directly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Frame]:
        """Have such an execution under way."""
        frame = self.begin_directly(args, kwargs)
        stack = self.frames.setdefault(get_ident(), [])
        stack.append(frame)
        try:
            yield frame
        finally:
            frame.is_over = True
            if frame in stack:
                stack.remove(frame)

    def _tap_inputs(
        self,
        plan: Plan,
        frame: Frame,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        asked = may_be_wired(plan.input_gradients, frame, "input")
        if not asked:
            return args, kwargs
        if len(asked) == 1 and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            listener, visit = asked[0]
            if not listener.leaf:
                path = visit.station.argument_path(args)
                tapped = gradients.tap_one(args[0], path, listener, visit)
                if tapped is None:
                    return args, kwargs
                frame.tap = (args[0], *tapped, args[0]._version)
                return (tapped[0],), kwargs
        bound = bind(module, args, kwargs)
        swaps, frame.taps = gradients.tap_inputs(bound, gradients.ears_for(bound, asked))
        if not swaps:
            return args, kwargs
        return unbind(module, _trees.replace_tensors(bound, swaps), args, kwargs)

    def leave_call(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        *,
        has_raised: bool = False,
    ) -> Any:
        """Run after the module's forward, also when it raised; None keeps the output."""
        stack = self.frames.get(get_ident())
        frame = stack.pop() if stack else self._end_short_way()
        if frame is None:
            return None
        frame.is_over = True
        visits = frame.visits
        if not visits:
            return None
        for session, visit in visits.items():
            if visit.station.is_root and not visit.is_recompute:
                session.end_root(visit.call)
            if visit.undo:
                session.end_again(visit)
        if has_raised:
            with suppress(RuntimeError):  # the forward's own error is the one to hear of
                self._settle(frame, None)
            for listener in self.plan.outputs:
                if listener.session in visits:
                    listener.on_raise(visits[listener.session])
            return None
        self._settle(frame, output)
        if self.lazy is not None:
            running = getattr(output, "gi_frame", None) or getattr(output, "cr_frame", None)
            if running is not None:
                self.lazy[running] = frame
        if self.plan.inside is not NOTHING_INSIDE:
            settle(self.plan.inside, frame)
        plan = self.plan
        before = output
        for listener in plan.outputs:
            one = visits.get(listener.session)
            if one is not None:
                output = listener.on_output(one, module, args, kwargs, output)
        if plan.output_gradients:
            asked = may_be_wired(plan.output_gradients, frame, "output", output)
            if len(asked) == 1 and isinstance(output, Tensor) and not asked[0][0].leaf:
                output = gradients.wire_one(output, *asked[0], frame.received)
            elif asked:
                path = asked[0][1].station.path
                ears = gradients.ears_for(output, asked)
                output = gradients.wire_outputs(output, ears, frame.received, path)
        return None if output is before else output

    def _settle(self, frame: Frame, output: Any) -> None:
        """Put the history of tapped arguments right, and watch over those given back."""
        if frame.tap is not None:
            original, alias, relay, version = frame.tap
            if original._version != version:
                aliases.rebase(original, alias)
            if not isinstance(output, Tensor):
                is_given_back = any(
                    aliases.shares_memory(one, alias) for _, one in _trees.leaves(output)
                )
            else:
                is_given_back = output is alias or (
                    output._is_view() and aliases.shares_memory(output, alias)
                )
            if is_given_back and not is_functorch_active():
                where = f"{relay.visit.station.path}:input.grad"
                relay.audits[0] = aliases.Audit(original, where)
        elif frame.taps is not None:
            frame.taps.rebase()
            frame.taps.audit(output)

    def _end_short_way(self) -> Frame | None:
        """Give the frame of an execution that began when only one session listened here."""
        for session, station in self.plan.stations:
            call = session.active.get(get_ident())
            if call is not None and call.short_ways and call.short_ways[-1][0] is self:
                visit = Visit(station, call, call.short_ways.pop()[1])
                return Frame(self.module, {session: visit})
        return None
