"""What the compiler traces for variables and operations inside a forward.

The counterpart of `hookline.hooks.inside`: an execution counts its values in a frame that exists
only while it is traced, so which value is which is known before the graph ever runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline._errors import UnsupportedModel
from hookline._tracing import is_in_checkpoint, settle_when_traced
from hookline.addresses import Inside
from hookline.hooks.inside import write_port
from hookline.hooks.nested import Walk, tensors
from hookline.hooks.operators import Way
from hookline.hooks.traced import EAGERLY, in_turn

_UNSEEN = frozenset(("/pad",))
"""Operations that the compiler puts into a graph past every mode."""


class Ask:
    """What one listener asks for inside a forward."""

    def __init__(self, inside: Inside, ear: Any, address: str) -> None:
        self.inside = inside
        self.spot = inside.mark + inside.name
        """The name with its mark, or a pattern of such."""
        self.is_input = inside.is_input
        self.is_exact = inside.is_exact
        self.number = inside.number
        self.ear = ear
        self.address = address

    def matches(self, spot: Inside) -> bool:
        """Tell whether it asks for this spot."""
        mine = self.inside
        is_kind = mine.mark == spot.mark and mine.is_input == spot.is_input
        return is_kind and bool(mine.matches(spot.name))


@settle_when_traced
def _is_matched(pattern: str, name: str) -> bool:
    """Tell whether a pattern means a name; found out once, when a graph is traced."""
    return bool(Inside("@", pattern).matches(name))


class Waiting:
    """Keep the latest values of a spot, until it is known which one is counted from the end."""

    is_editing = False
    is_parting = False
    values = True
    gradients = False

    def __init__(self, ear: Any, number: int) -> None:
        self.ear = ear
        self.number = number


class _Copying:
    """Copy every tensor of a value."""

    is_editing = True
    is_passing = False

    def tell(self, value: Tensor, place: str, way: Way) -> Tensor:
        return value.detach().clone()


class Spot:
    """Who asks for the values with one name, in order."""

    def __init__(self, asks: list[Ask]) -> None:
        numbers = {one.number for one in asks if one.number is not None and one.number >= 0}
        self.is_exact = any(one.is_exact for one in asks)
        """Whether somebody asks for it by its name, tensor or not."""
        self.others = _in_turn(asks, None)
        """Who is told of values that nobody asks for by number."""
        self.numbered = {number: _in_turn(asks, number) for number in numbers}
        """Who is told of those with a number that somebody asks for."""

    def ears(self, index: int) -> tuple[Any, ...]:
        """Give who is told of the value with this number."""
        return self.numbered.get(index, self.others)


def _in_turn(asks: list[Ask], index: int | None) -> tuple[Any, ...]:
    ears: list[Any] = []
    for one in asks:
        number = one.number
        if number is None or number == index:
            ears.append(one.ear)
        elif number < 0:
            ears.append(Waiting(one.ear, number))
    return in_turn(ears)


def refuse_checkpoint() -> None:
    """Raise inside a checkpointed region, where nothing outside of it may be changed."""
    if is_in_checkpoint():
        raise UnsupportedModel(
            "variables and operations cannot be heard inside a checkpointed region of a graph "
            f"that torch.compile made; modules can. {EAGERLY}"
        )


class TracedFrame:
    """One execution of a module, while it is traced."""

    def __init__(self, received: list[Tensor]) -> None:
        self.counts: dict[str, int] = {}
        """How many values each spot had."""
        self.received = received
        """The tensors that came in, which others use too."""
        self.waiting: list[tuple[Waiting, str, list[tuple[int, Any]]]] = []
        """The latest values of spots that are counted from the end."""

    def count(self, spot: str) -> int:
        """Give the number of the next value of a spot."""
        index = self.counts.get(spot, 0)
        self.counts[spot] = index + 1
        return index

    def wait(self, ear: Waiting, spot: str, index: int, value: Any) -> None:
        """Keep a value that may turn out to be the one; a copy, for it may yet be changed."""
        held = (index, Walk(_Copying(), "own", []).tell(value, "")[0])
        for other, name, latest in self.waiting:
            if other.ear is ear.ear and name == spot:
                latest.append(held)
                if len(latest) > -ear.number:
                    latest.pop(0)
                return
        self.waiting.append((ear, spot, [held]))

    def settle(self) -> None:
        """Tell of the values that turned out to be the ones, now that all are known."""
        for ear, spot, latest in self.waiting:
            if len(latest) == -ear.number:
                index, value = latest[0]
                ear.ear.flow(write_port(spot, index), value)


class TracedInside:
    """What is asked inside one module's forward, for the compiler."""

    def __init__(self, asks: list[Ask]) -> None:
        self.has_gradients = any(one.ear.gradients for one in asks)
        for one in asks:
            if (one.number or 0) < 0 and one.ear.gradients:
                raise UnsupportedModel(
                    f"`{one.address}`: which value is counted from the end is known when forward "
                    "ends, too late to hear of its gradient inside a graph that torch.compile "
                    "made. Name it by its number from the start, or ask for the model to be run "
                    'eagerly: compiled="eager"'
                )
            if one.spot in _UNSEEN:
                raise UnsupportedModel(
                    f"`{one.address}`: the compiler does not show this operation to those who "
                    f"look on while it traces. {EAGERLY}"
                )
        self.exact: dict[str, Spot] = {}
        """Who asks for each name that is asked for by itself, and by patterns too."""
        for one in asks:
            if one.is_exact:
                end = ":input" if one.is_input else ""
                inside = Inside(one.inside.mark, one.inside.name, is_input=one.is_input)
                self.exact[one.spot + end] = Spot([ask for ask in asks if ask.matches(inside)])
        self.patterns = tuple(one for one in asks if not one.is_exact)
        self.frames: list[TracedFrame] = []
        """The execution under way, if one is."""

    def at(self, spot: str) -> Spot | None:
        """Give who asks for a spot; None if nobody does."""
        found = self.exact.get(spot)
        if found is not None or not self.patterns:
            return found
        name, _, port = spot.partition(":")
        asks = []
        for one in self.patterns:
            is_kind = one.spot[0] == name[0] and one.is_input == (port == "input")
            if is_kind and _is_matched(one.spot[1:], name[1:]):
                asks.append(one)
        return Spot(asks) if asks else None

    def enter(self, received: list[Tensor]) -> TracedFrame:
        """Begin an execution, given the tensors that came in."""
        if self.frames:
            raise UnsupportedModel(
                "a module whose variables or operations are asked for calls itself inside a graph "
                f"that torch.compile made: which value is of which call is not known. {EAGERLY}"
            )
        refuse_checkpoint()
        frame = TracedFrame(received)
        self.frames.append(frame)
        return frame

    def enter_callee(self) -> TracedFrame:
        """Begin a function that the execution under way calls."""
        refuse_checkpoint()
        return self.frames[-1]

    def leave(self) -> None:
        """End an execution."""
        if self.frames:
            self.frames.pop().settle()

    def take_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin an execution that a hook announces."""
        self.enter(tensors([*args, *kwargs.values()]) if self.has_gradients else [])

    def flow(self, frame: TracedFrame, spot: str, index: int, value: Any) -> Any:
        """Tell those who ask for a value; give the one that flows on."""
        port = write_port(spot, index)
        for ear in self._find_ears(spot, index):
            if isinstance(ear, Waiting):
                frame.wait(ear, spot, index, value)
            else:
                value = ear.flow(port, value, "own", frame.received)
        return value

    def flow_taken(
        self, frame: TracedFrame, spot: str, index: int, bound: dict[Any, Any]
    ) -> dict[Any, Any]:
        """Tell of what an operation takes; give what it is called with."""
        port = write_port(spot, index)
        way: Way = "part"
        for ear in self._find_ears(spot, index):
            if isinstance(ear, Waiting):
                frame.wait(ear, spot, index, bound)
            else:
                bound = ear.flow(port, bound, way)
                way = "own" if ear.is_parting else way
        return bound

    def flow_spent(
        self, frame: TracedFrame, spot: str, index: int, bound: dict[Any, Any], key: Any
    ) -> dict[Any, Any]:
        """Tell of what an operation takes that is about to change one of its arguments in place."""
        port, changed = write_port(spot, index), bound[key]
        others = [one for one in tensors(bound) if one is not changed]
        ears = self._find_ears(spot, index)
        # Who parts a history later hears of its gradient sooner.
        last = [one for one in reversed(ears) if not one.values]
        for ear in (*[one for one in ears if one.values], *last):
            if isinstance(ear, Waiting):
                frame.wait(ear, spot, index, bound)
                continue
            bound = dict(ear.flow(port, bound, "spent", others))
            if ear.is_editing and ear.values:
                _write_over(changed, bound[key])
            # The forward goes on with the tensor itself.
            bound[key] = changed
        return bound

    def flow_changed(self, frame: TracedFrame, spot: str, index: int, value: Any) -> None:
        """Tell of what an operation changed in place; what edits it writes to it."""
        port = write_port(spot, index)
        for ear in self._find_ears(spot, index):
            if isinstance(ear, Waiting):
                frame.wait(ear, spot, index, value)
                continue
            new = ear.flow(port, value)
            if ear.is_editing and ear.values:
                _write_over(value, new)

    def _find_ears(self, spot: str, index: int) -> tuple[Any, ...]:
        found = self.at(spot)
        return () if found is None else found.ears(index)


def _write_over(old: Any, new: Any) -> None:
    """Change tensors in place into those that an edit gave for them."""
    for before, after in zip(tensors(old), tensors(new), strict=True):
        before.copy_(after)


class TracedScope:
    """The variables of one function in one execution, while it is traced."""

    def __init__(
        self,
        inside: TracedInside,
        frame: TracedFrame,
        names: list[Any],
        *,
        prefixes: tuple[str, ...] = ("",),
        is_alone: bool = False,
    ) -> None:
        self.inside = inside
        self.frame = frame
        self.names = names
        """The names of each variable, by the number that the rewritten function has for it."""
        self.prefixes = prefixes
        """What comes before the names of functions called here."""
        self.is_alone = is_alone
        """Whether the execution ends with the function, because no hook announced it."""

    def assign(self, point: int, value: Any) -> Any:
        """Tell of a value as it is assigned; give the one that is."""
        spots = self.names[point]
        for spot in (spots,) if isinstance(spots, str) else spots:
            value = self.inside.flow(self.frame, spot, self.frame.count(spot), value)
        return value

    def end(self) -> None:
        """End the function."""
        if self.is_alone:
            self.inside.leave()
