"""Who hears what a compiled graph delivers: executions become visits, values reach listeners."""

from __future__ import annotations

from collections.abc import Mapping
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookline._torch import graph_task_id
from hookline.hooks.hearing import (
    AGAIN,
    BACK,
    BEGIN,
    BESIDE,
    FAULT,
    GRADIENT,
    MISSING,
    REASON,
    SHAPE,
    Ear,
    Gradient,
    Place,
    read_about,
)

if TYPE_CHECKING:
    from hookline.hooks.frames import Frame
    from hookline.hooks.sessions import Session
    from hookline.hooks.visits import Listener, Station, Visit

_ABOUT = frozenset((SHAPE, MISSING, REASON, FAULT))


def is_remark(place: Place) -> bool:
    """Tell whether something is said of a value, and no value is delivered."""
    return place.port in _ABOUT


class VisitEar(Ear):
    """Count the executions of a module for one session, as its hooks would."""

    __slots__ = ("_around", "_seen", "current", "frames", "listeners", "session", "station")

    def __init__(self, device: torch.device, session: Session, station: Station) -> None:
        super().__init__(device)
        self.session = session
        self.station = station
        self.current: dict[int, Visit | None] = {}
        """The visit under way, or the latest, by thread."""
        self.frames: Mapping[int, list[Frame]] = {}
        """The executions that hooks beside the graph know of, by thread."""
        self.listeners: list[Listener] = []
        """Those who are told that an execution begins."""

        self._seen: dict[int, set[tuple[Ear, Place]]] = {}
        """What came in the visit under way, by thread."""
        self._around: dict[int, list[tuple[Visit | None, set[tuple[Ear, Place]]]]] = {}
        """The executions that those under way are inside of, and what came in them, by thread."""

    def visit_of(self, ear: Ear, place: Place) -> Visit | None:
        """Give the visit that a value is of; begin one where none was announced.

        That is so in checkpointed regions: what comes a second time is of the next execution.
        """
        thread = get_ident()
        visit = self.current.get(thread)
        seen = self._seen.get(thread, ())
        is_old = visit is not None and self.session.active.get(thread) is not visit.call
        if visit is None or (ear, place) in seen or (is_old and graph_task_id() == -1):
            visit = self._begin(thread, place)
        self._seen.setdefault(thread, set()).add((ear, place))
        return visit

    def _begin(self, thread: int, place: Place, traced: int = 0) -> Visit | None:
        """Count an execution; no frame tells of as many around it as are in the graph, with it."""
        self._seen[thread] = set()
        # Graphs run without grad: what is said is how it was where they were traced.
        with torch.set_grad_enabled(place.has_grad):
            visit = self.session.begin(self.station, thread, graph_task_id(), traced=traced)
        self.current[thread] = visit
        if visit is not None:
            for listener in self.listeners:
                listener.on_begin(visit)
        return visit

    def take(self, tensor: Tensor, place: Place) -> Gradient | None:
        thread = get_ident()
        session = self.session
        if place.port == BESIDE:
            stack = self.frames.get(thread)
            visit = stack[-1].visits.get(session) if stack else None
            if visit is not None:
                self._seen[thread] = set()
                self.current[thread] = visit
                return None
        if place.port == AGAIN:
            before = self.current.get(thread), self._seen.get(thread, set())
            self._around.setdefault(thread, []).append(before)
            self._begin(thread, place, traced=2)
            return None
        if place.port == BACK:
            around = self._around.get(thread)
            if around:
                self.current[thread], self._seen[thread] = around.pop()
            return None
        if place.port in (BEGIN, BESIDE):
            self._around.pop(thread, None)  # left behind where a graph has raised
            self._begin(thread, place, traced=1)
            return None
        call = session.active.get(thread)
        if call is not None and graph_task_id() == -1:
            session.end_root(call)
        return None


class ListenerEar(Ear):
    """Hand what is delivered to a listener, with the visit it belongs to."""

    __slots__ = ("listener", "visits")

    def __init__(self, device: torch.device, listener: Listener, visits: VisitEar) -> None:
        super().__init__(device)
        self.listener = listener
        self.visits = visits

    def take(self, tensor: Tensor, place: Place) -> Gradient | None:
        visit = self.visits.visit_of(self, place)
        listener = self.listener
        if visit is None or not listener.session.is_open:
            return None
        if place.port in _ABOUT:
            if not visit.is_recompute:
                listener.on_remark(visit, place.port, *read_about(place))
            return None
        if place.port.startswith(GRADIENT):
            place = place._replace(port=place.port.removeprefix(GRADIENT))
        elif listener.values and not visit.is_recompute:
            listener.on_delivery(visit, place, tensor)
        if not listener.gradients:
            return None
        heard = visit.original or visit
        epoch = listener.session.epoch

        def tell(grad: Tensor) -> None:
            if listener.session.epoch is epoch:
                listener.on_delivered_gradient(heard, place, grad, graph_task_id())

        return tell
