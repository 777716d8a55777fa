"""What is asked inside a module's forward, and how a value there reaches those who ask.

A spot is a variable or an operation with its mark: `@scores`, `/softmax`, `/softmax:input`. Which
of its values one is, counted within the visit, makes it a port: `@scores[2]`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookline import _trees
from hookline._torch import add_tensor_hook
from hookline._trees import Path
from hookline.addresses import Inside, parse_port
from hookline.hooks import gradients
from hookline.hooks.frames import Frame, may_be_wired
from hookline.hooks.visits import Listener, Visit


def write_port(spot: str, index: int) -> str:
    """Write the port of the value with this number: `@scores[2]`, `/softmax[0]:input`."""
    name, colon, rest = spot.partition(":")
    return f"{name}[{index}]{colon}{rest}"


class Asked:
    """Who listens at one spot, in order."""

    __slots__ = ("gradients", "has_edits", "only", "ports", "spot", "values")

    def __init__(self, spot: str, values: list[Listener], gradients: list[Listener]) -> None:
        self.spot = spot
        self.values = values
        self.gradients = gradients
        self.has_edits = any(one.stage == 1 for one in values)
        self.only: Listener | None = None
        """The one who wants every value here and no gradient, if nobody else asks."""
        if len(values) == 1 and not gradients and values[0].inside is not None:
            self.only = values[0] if values[0].inside.number is None else None
        self.ports: dict[int, str] = {}
        """The ports of the values met so far, by number."""

    def port(self, index: int) -> str:
        """Give the port of the value with this number."""
        port = self.ports.get(index)
        if port is None:
            port = self.ports[index] = write_port(self.spot, index)
        return port

    def pick(self, values: list[Listener]) -> Asked:
        """Give the same spot with some who listen, and no gradients."""
        return Asked(self.spot, values, [])


class InsidePlan:
    """What is asked inside one module's forward; replaced, never changed."""

    __slots__ = (
        "asked",
        "has_gradients",
        "listeners",
        "needs_end",
        "operations",
        "passed",
        "variables",
        "wanted_operations",
    )

    def __init__(self, listeners: list[Listener]) -> None:
        self.listeners = listeners
        self.asked: dict[str, Asked | None] = {}
        """Who listens at each spot that was met; through `at`, which fills it."""
        insides = [one.inside for one in listeners if one.inside is not None]
        self.variables = frozenset(one.name for one in insides if one.mark == "@")
        """The variables asked for; a pattern where the function is known only when called."""
        self.operations = [one for one in insides if one.mark == "/"]
        self.wanted_operations: set[str] | None = None
        """The operations asked for; None where a pattern asks for many."""
        if all(one.is_exact for one in self.operations):
            self.wanted_operations = {one.name for one in self.operations}
        self.passed: set[Any] = set()
        """Functions of torch that are known to be none of those asked for."""
        self.has_gradients = any(one.gradients for one in listeners)
        self.needs_end = any(
            one.session.hears_leaving or (one.inside is not None and (one.inside.number or 0) < 0)
            for one in listeners
        )
        """Whether somebody waits for the end of forward."""

    def at(self, spot: str) -> Asked | None:
        """Give who listens at a spot; None if nobody does."""
        try:
            return self.asked[spot]
        except KeyError:
            asked = self.asked[spot] = self._find(parse_port(spot))
            return asked

    def _find(self, spot: Inside) -> Asked | None:
        found = [
            one
            for one in self.listeners
            if one.inside is not None
            and one.inside.mark == spot.mark
            and one.inside.is_input == spot.is_input
            and one.inside.matches(spot.name)
        ]
        if not found:
            return None
        return Asked(
            str(spot),
            [one for one in found if one.values],
            [one for one in found if one.gradients],
        )


NOTHING_INSIDE = InsidePlan([])


def flow(asked: Asked, frame: Frame, index: int, value: Any) -> Any:
    """Pass a value to those who listen at its spot; give the value that flows on."""
    visits = frame.visits
    only = asked.only
    if only is not None:
        visit = visits.get(only.session)
        if visit is None or not _is_listening(only):
            return value
        return only.on_value(visit, frame.module, asked.port(index), value)
    for listener in asked.values:
        visit = visits.get(listener.session)
        if visit is None or not _is_listening(listener):
            continue
        if _is_wanted(listener, frame, asked.spot, index, value):
            value = listener.on_value(visit, frame.module, asked.port(index), value)
    if asked.gradients:
        value = _wire(asked, frame, index, value)
    return value


def _is_listening(listener: Listener) -> bool:
    """Tell whether a listener is to be told: not when its session was closed in mid-forward."""
    return listener.session.is_open or listener.session.is_lingering


def _is_wanted(listener: Listener, frame: Frame, spot: str, index: int, value: Any) -> bool:
    """Tell whether a listener wants the value with this number now; the last is known later."""
    assert listener.inside is not None
    wanted = listener.inside.number
    if wanted is None or wanted == index:
        return True
    listener.most_seen = max(listener.most_seen, index)
    if wanted < 0:
        if frame.waiting is None:
            frame.waiting = {}
        _, latest = frame.waiting.setdefault(
            (listener, spot), (spot, deque[tuple[int, Any]](maxlen=-wanted))
        )
        # A copy: what is assigned now may be changed in place before forward ends.
        latest.append((index, _trees.map_tensors(value, lambda _, tensor: tensor.clone())))
    return False


def settle(plan: InsidePlan, frame: Frame) -> None:
    """Hand over what turned out to be the last of its name, and say that forward is over."""
    for (listener, _), (spot, latest) in (frame.waiting or {}).items():
        visit = frame.visits.get(listener.session)
        if visit is not None and latest.maxlen == len(latest):
            index, value = latest[0]
            listener.on_value(visit, frame.module, write_port(spot, index), value)
    for view in frame.views or ():
        view.tell_change()
    for listener in plan.listeners:
        visit = frame.visits.get(listener.session)
        if visit is not None and listener.session.hears_leaving:
            listener.on_leave(visit)


def select_wired(asked: Asked, frame: Frame, index: int) -> list[tuple[Listener, Visit]]:
    """List who gets the gradient of the value with this number."""
    chosen: list[Listener] = []
    for listener in asked.gradients:
        assert listener.inside is not None
        wanted = listener.inside.number
        if wanted is None or wanted == index:
            listener.may_hear()
            chosen.append(listener)
        elif wanted < 0:
            listener.may_hear()
            counts = frame.counts
            is_it = _is_counted_from_end(counts, asked.spot, index - wanted)
            chosen.append(_OnlyIf(listener, is_it))
    return may_be_wired(chosen, frame, asked.port(index))


def _is_counted_from_end(counts: dict[str, int], spot: str, total: int) -> Callable[[], bool]:
    name = spot.partition(":")[0]
    return lambda: counts[name] == total


def _wire(spot: Asked, frame: Frame, index: int, value: Any) -> Any:
    asked = select_wired(spot, frame, index)
    port = spot.port(index)
    asked = [pair for pair in asked if _may_tap(pair, frame, port, value)]
    if not asked:
        return value
    if not isinstance(value, Tensor) and not any(True for _ in _trees.leaves(value)):
        for listener, visit in asked:
            listener.no_gradient(visit, port, None, "no tensor")
        return value
    if frame.views is None:
        frame.views = []
    if len(asked) == 1 and isinstance(value, Tensor) and not asked[0][0].leaf:
        return gradients.wire_one(value, *asked[0], frame.received, port=port, views=frame.views)
    path = asked[0][1].station.path
    ears = gradients.ears_for(value, asked)
    return gradients.wire_outputs(value, ears, frame.received, path, port=port, views=frame.views)


def _may_tap(pair: tuple[Listener, Visit], frame: Frame, port: str, value: Any) -> bool:
    """Tell whether a listener is content with what it takes to hear of this gradient."""
    listener, visit = pair
    if listener.taps_arguments or not isinstance(value, Tensor) or not value.requires_grad:
        return True
    if not value.is_leaf and frame.received.get(id(value)) != value._version:
        return True
    listener.no_gradient(visit, port, None, "an argument")
    return False


def hear_changed(spot: Asked, frame: Frame, index: int, value: Any) -> None:
    """Have the gradients of a tensor that was changed in place delivered, by hooks on it."""
    port = spot.port(index)
    asked = select_wired(spot, frame, index)
    ears = gradients.ears_for(value, asked)
    if not isinstance(value, Tensor) or not ears:
        return
    if value.requires_grad:
        add_tensor_hook(value, gradients.Relay(port, [[()]], ears))
    else:
        for listener, visit, _ in ears:
            listener.no_gradient(visit, port, (), "no-grad tensor")


class _OnlyIf(Listener):
    """Hear of a gradient in the place of another listener, if its value was the right one."""

    __slots__ = ("is_careful", "is_it", "other")

    def __init__(self, other: Listener, is_it: Callable[[], bool]) -> None:
        super().__init__(
            other.session,
            other.station,
            other.port,
            other.leaf,
            values=False,
            gradients=True,
            stage=other.stage,
        )
        self.other = other
        self.is_it = is_it
        self.taps_arguments = other.taps_arguments
        self.is_careful = other.is_careful

    hears_missing = False

    def on_gradient(self, visit: Visit, port: str, leaf: Path, grad: Any, task: int) -> Any:
        return self.other.on_gradient(visit, port, leaf, grad, task) if self.is_it() else grad

    def no_gradient(self, visit: Visit, port: str, leaf: Path | None, reason: str) -> None:
        self.other.no_gradient(visit, port, leaf, reason)

    def no_leaf(self, visit: Visit, tree: Any) -> None:
        self.other.no_leaf(visit, tree)
