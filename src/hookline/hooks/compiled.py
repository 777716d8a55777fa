"""What a junction asks of a compiled graph: an ear for each listener, and what dynamo traces."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline._errors import UnsupportedModel
from hookline.hooks.arguments import positional_names
from hookline.hooks.ears import VisitEar
from hookline.hooks.guarding import forget_unguarded
from hookline.hooks.hearing import Ear
from hookline.hooks.limits import part_limits
from hookline.hooks.operators import ease_tracing
from hookline.hooks.short_calls import shorten_calls
from hookline.hooks.traced import Refused, Traced, TracedEar, in_turn
from hookline.hooks.traced_inside import Ask, TracedInside
from hookline.hooks.unlisted import show_unlisted

if TYPE_CHECKING:
    from hookline.hooks.frames import Frame
    from hookline.hooks.plans import Plan
    from hookline.hooks.sessions import Session
    from hookline.hooks.visits import Listener


UNREADY = Refused(
    "hookline attached to this model before torch.compile was first used, and cannot be traced "
    "now. Attach after torch.compile(...) or model.compile(), or call the model eagerly: "
    'with torch.compiler.set_stance("force_eager"): ...'
)
"""What is traced where the compiler was not there yet when the hooks were put on."""


def may_be_traced() -> bool:
    """Tell whether the compiler is there, so that it may trace a model."""
    return "torch._dynamo" in sys.modules


def prepare_compiler() -> None:
    """Have the compiler, where it is loaded, take what is traced by the shortest ways."""
    ease_tracing()
    shorten_calls()
    forget_unguarded()
    part_limits()
    show_unlisted()


class Wiring:
    """The ears of one module's listeners; they hear as long as this is held."""

    __slots__ = ("_made", "_plan", "_sample", "_visits", "device", "ears", "refusal", "traced")

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        frames: Mapping[int, list[Frame]] | None = None,
        *,
        previous: Wiring | None = None,
    ) -> None:
        self._plan = plan
        sample = _find_sample(module, plan)
        self._sample = None if sample is None else weakref.ref(sample)
        self.device = device = torch.device("cpu") if sample is None else sample.device
        # Who listens on goes on to hear: a backward may still have to run, or a CUDA graph has it.
        if previous is not None and previous.device != device:
            previous = None
        self._made: dict[Listener, tuple[Ear | None, Any]] = previous._made if previous else {}
        """The ear of each listener that was ever here, and what is traced for it."""
        self._visits: dict[Session, VisitEar] = {}
        visits = self._visits
        for session, station in plan.stations:
            if station.is_root or session.needs_visits:
                known = None if previous is None else previous._visits.get(session)
                visits[session] = ear = known or VisitEar(device, session, station)
                ear.frames = {} if frames is None else frames
                ear.listeners = []
        self.ears: list[Ear] = list(visits.values())
        self.refusal = ""
        """Why it cannot be done in a graph; empty where it can."""
        beginning = tuple(TracedEar(one.key) for one in visits.values())
        ending = tuple(TracedEar(one.key) for one in visits.values() if one.station.is_root)
        names, rest = positional_names(module)
        self.traced: Any
        """What the compiler traces in the place of the hooks."""
        try:
            self.traced = Traced(
                beginning=beginning,
                ending=ending,
                inputs=self._hear(device, visits, [*plan.inputs, *plan.input_gradients]),
                outputs=self._hear(device, visits, [*plan.outputs, *plan.output_gradients]),
                inside=self._hear_inside(device, visits, plan.inside.listeners),
                argument_names=names,
                rest_name=rest,
                # It gives a view of what it made, unless there is one row only.
                way="made" if type(module).forward is nn.Linear.forward else "own",
                # What it writes over is spent, and an alias of it would lose its history.
                way_in="spent" if getattr(module, "inplace", False) is True else "part",
            )
        except UnsupportedModel as error:
            self.refusal = str(error)
            self.traced = Refused(self.refusal)
        for listener in (*plan.inputs, *plan.outputs):
            if listener.hears_begin and listener.session in visits:
                visits[listener.session].listeners.append(listener)
        here = {session for session, _ in plan.stations}
        self._made = {
            listener: made
            for listener, made in self._made.items()
            if listener.session in here or listener.session.is_reusable  # it may come again
        }

    def serves(self, module: nn.Module, plan: Plan) -> bool:
        """Tell whether this is what a plan asks for, and on the device where the values are."""
        if plan is not self._plan:
            return False
        sample = None if self._sample is None else self._sample()
        if sample is None:  # to look for one takes as long as all else that opening does
            sample = _find_sample(module, plan)
        return self.device == (torch.device("cpu") if sample is None else sample.device)

    def forget_frames(self) -> None:
        """Learn that a forward raised, between graphs: no execution is under way any more."""
        inside = getattr(self.traced, "inside", None)
        if inside is not None:
            inside.frames.clear()

    def _hear(
        self, device: torch.device, visits: dict[Session, VisitEar], asked: list[Listener]
    ) -> tuple[Any, ...]:
        return in_turn([ear for _, ear in self._make_ears(device, visits, asked)])

    def _hear_inside(
        self, device: torch.device, visits: dict[Session, VisitEar], asked: list[Listener]
    ) -> TracedInside | None:
        asks = [
            Ask(one.inside, ear, one.address)
            for one, ear in self._make_ears(device, visits, asked)
            if one.inside is not None
        ]
        return TracedInside(asks) if asks else None

    def _make_ears(
        self, device: torch.device, visits: dict[Session, VisitEar], asked: list[Listener]
    ) -> list[tuple[Listener, Any]]:
        found = []
        for listener in sorted(dict.fromkeys(asked), key=lambda one: (one.stage, one.sequence)):
            made = self._made.get(listener)
            if made is None:
                made = listener.make_ear(device, visits.get(listener.session))
                self._made[listener] = made
            ear, traced = made
            if ear is not None:
                self.ears.append(ear)
            if traced is not None:
                found.append((listener, traced))
        return found


def _find_sample(module: nn.Module, plan: Plan) -> Tensor | None:
    """Give a tensor that is where a module's values are: its own, or one of the model's."""
    trees = [session.tree for session, _ in plan.stations if session.tree is not None]
    for one in (module, *(tree.root for tree in trees)):
        for tensor in itertools.chain(one.parameters(), one.buffers()):
            if tensor.device.type != "meta":
                return tensor
            break
    return None
