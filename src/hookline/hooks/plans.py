"""What all sessions together ask of one module, sorted by where it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.hooks.inside import NOTHING_INSIDE, InsidePlan
from hookline.hooks.visits import LightEar, Listener, Station

if TYPE_CHECKING:
    from hookline.hooks.sessions import Session


class Plan:
    """What is asked at a module now; replaced, never changed, when a session comes or goes."""

    __slots__ = (
        "_ear",
        "bare_root",
        "input_gradients",
        "inputs",
        "inside",
        "light",
        "only_variables",
        "output_gradients",
        "outputs",
        "solo",
        "stations",
        "values_inside",
    )

    def __init__(self, stations: list[tuple[Session, Station]], listeners: list[Listener]) -> None:
        if len(listeners) > 1:
            listeners = sorted(listeners, key=lambda one: (one.stage, one.sequence))
        if len(stations) > 1:  # a call begins with parameters: before edits, edits, after edits
            stations = sorted(stations, key=lambda pair: pair[0].parameter_order)
        self.stations = stations
        self.inputs: list[Listener] = []
        self.outputs: list[Listener] = []
        self.input_gradients: list[Listener] = []
        self.output_gradients: list[Listener] = []
        self.inside = NOTHING_INSIDE
        inside = [one for one in listeners if one.inside is not None]
        if inside:
            self.inside = InsidePlan(inside)
        for one in listeners:
            if one.inside is not None:
                continue
            is_input = one.port == "input"
            if one.values:
                (self.inputs if is_input else self.outputs).append(one)
            if one.gradients:
                (self.input_gradients if is_input else self.output_gradients).append(one)
        self.bare_root: tuple[Session, Station] | None = None
        """The one session whose root this is, if nobody asks for anything: calls are counted."""
        if len(stations) == 1 and not listeners and stations[0][1].is_root:
            self.bare_root = stations[0]
        self.solo: tuple[Session, Station, Listener] | None = None
        """The only one who asks here, if it is for output values and nothing else: a short way."""
        if len(listeners) == len(self.outputs) == len(stations) == 1 and not listeners[0].gradients:
            session, station = stations[0]
            if not (station.is_root or session.follows_recompute):
                self.solo = (session, station, listeners[0])
        self.light: tuple[Session, Station, Listener] | None = None
        """The only one who asks here, if it is for an output and its gradient, and needs neither a
        visit nor a frame: one more short way."""
        if len(listeners) == len(self.outputs) == len(self.output_gradients) == len(stations) == 1:
            session, station = stations[0]
            if listeners[0].may_be_light and not station.is_root:
                self.light = (session, station, listeners[0])
        self._ear: LightEar | None = None
        asking = {one.station for one in listeners}
        self.only_variables = bool(inside) and (
            len(inside) == len(listeners)
            and not self.inside.operations
            and not self.inside.has_gradients
            and all(station in asking and not station.is_root for _, station in stations)
        )
        """Whether all that is asked is values of variables: the rewritten forward does then."""
        self.values_inside: tuple[Session, Station] | None = None
        """The only one who asks here, if it is for values inside forward: another short way."""
        if inside and len(inside) == len(listeners) and len(stations) == 1:
            session, station = stations[0]
            is_plain = not (station.is_root or session.follows_recompute)
            if is_plain and not self.inside.has_gradients:
                self.values_inside = (session, station)

    def light_ear(self) -> LightEar:
        """Give what hears outputs for the one of `light`, made once however often it is opened."""
        assert self.light is not None
        if self._ear is None:
            self._ear = self.light[2].make_light_ear()
        return self._ear


NOTHING = Plan([], [])
