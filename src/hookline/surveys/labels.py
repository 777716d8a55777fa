"""The labels beside a forward's source: which names there are on a line, and with which numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from hookline.sources import Point, Reading
from hookline.surveys.naming import is_of_torch
from hookline.surveys.pages import Label
from hookline.surveys.predicting import predict
from hookline.surveys.tracing import Event, Spot, Trace

_NOT_RUN = "(not run)"
_MOST_LOOKS = 2
_MOST_NUMBERS = 3


class Place(NamedTuple):
    """A name on a line."""

    line: int | None
    """None where there is no source."""
    mark: str
    name: str


@dataclass(slots=True)
class Mention:
    """What is known of a name on a line."""

    numbers: list[int] = field(default_factory=list)
    """Which assignments or calls it is; none where it is the only one, or that is in doubt."""
    looks: dict[str, None] = field(default_factory=dict)
    """What was there, each once."""
    times: Counter[object] = field(default_factory=Counter)
    """How often it ran in each visit."""
    has_run: bool = True
    is_main: bool = False
    """Whether it is a variable that is assigned, not an argument."""
    is_single: bool = True
    """Whether it is one value in a visit."""

    @property
    def suffix(self) -> str:
        """Write the number, or which ones, or from which to which."""
        numbers = sorted(set(self.numbers))
        if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"[{numbers[0]}]..[{numbers[-1]}]"
        if len(numbers) <= _MOST_NUMBERS:
            return ",".join(f"[{number}]" for number in numbers)
        return f"[{numbers[0]}],[{numbers[1]}]..[{numbers[-1]}]"

    def each(self) -> Sequence[int | None]:
        """List its numbers, each once; None where it needs none."""
        return sorted(set(self.numbers)) or [None]

    @property
    def look(self) -> str:
        """Write what was there, and how often."""
        if not self.has_run:
            return _NOT_RUN
        looks = [look for look in self.looks if look]
        text = ", ".join(looks[:_MOST_LOOKS]) + (", ..." if len(looks) > _MOST_LOOKS else "")
        most = max(self.times.values(), default=1)
        return f"{text}  x{most}" if most > 1 else text


class Labels:
    """Every name of a function, by line."""

    def __init__(self, helper: str | None = None) -> None:
        self._helper = helper
        self._mentions: dict[Place, Mention] = {}

    def mention(self, line: int | None, mark: str, name: str) -> Mention:
        """Give what is known of a name on a line."""
        return self._mentions.setdefault(Place(line, mark, name), Mention())

    def has(self, line: int, name: str) -> bool:
        """Tell whether a variable is mentioned on a line."""
        return Place(line, "@", name) in self._mentions

    def at(self, line: int) -> tuple[Label, ...]:
        """List the labels of a line: variables, then operations."""
        return tuple(self._written(line))

    def unplaced(self) -> tuple[Label, ...]:
        """List the labels of a function without source."""
        return tuple(self._written(None))

    def _written(self, line: int | None) -> Iterator[Label]:
        for mark in "@/":
            for place, mention in self._mentions.items():
                if place.line == line and place.mark == mark:
                    start = "." if mark == "@" and self._helper is not None else mark
                    yield Label(f"{start}{place.name}{mention.suffix}", mention.look)

    def _address(self, place: Place, number: int | None) -> str:
        inside = f"{self._helper}." if place.mark == "@" and self._helper is not None else ""
        which = "" if number is None else f"[{number}]"
        return f"{place.mark}{inside}{place.name}{which}"

    def addresses(self, paths: Iterable[str]) -> list[str]:
        """List the addresses of what ran, or may run, in these modules."""
        return [
            f"{path}{self._address(place, number)}"
            for path in paths
            for place, mention in sorted(
                self._mentions.items(), key=lambda item: (item[0].line or 0, item[0].mark == "/")
            )
            if mention.has_run
            for number in mention.each()
        ]

    def favourite(self) -> str | None:
        """Choose a name to show the use of: the last variable that holds a tensor."""
        ran = [(place, one) for place, one in self._mentions.items() if one.has_run]
        single = [pair for pair in ran if pair[1].is_single]
        main = [pair for pair in single if pair[1].is_main]
        shaped = [pair for pair in main if any(map(_is_shape, pair[1].looks))]
        chosen = shaped or main or [pair for pair in single if pair[0].mark == "/"] or single
        if not chosen:
            return None
        place, mention = max(chosen, key=lambda pair: pair[0].line or 0)
        return self._address(place, mention.numbers[0] if mention.numbers else None)


def _is_shape(look: str) -> bool:
    return look[:1].isdigit()


def expected_labels(
    function: Callable[..., Any], reading: Reading, module: nn.Module, helper: str | None
) -> Labels:
    """Label what the source alone tells."""
    labels = Labels(helper)
    often = Counter(point.name for point in reading.points)
    counts: Counter[str] = Counter()
    in_doubt: set[str] = set()
    for point in reading.points:
        mention = labels.mention(point.line, "@", point.name)
        mention.is_main |= _is_main(point)
        if not point.is_certain:
            in_doubt.add(point.name)
        # A function may be called several times, so its assignments are not numbered.
        if often[point.name] > 1 and point.name not in in_doubt and helper is None:
            mention.numbers.append(counts[point.name])
        is_only = often[point.name] == 1 and point.is_certain
        mention.is_single = len(mention.numbers) == 1 or is_only
        counts[point.name] += 1
    if helper is not None and is_of_torch(function):
        return labels  # one operation to those who listen, whatever it calls
    for operation in predict(function, reading, module):
        mention = labels.mention(operation.line, "/", operation.name)
        if operation.number is not None and helper is None:
            mention.numbers.append(operation.number)
        mention.is_single = len(mention.numbers) == 1
    return labels


def _is_main(point: Point) -> bool:
    return point.kind in ("assignment", "walrus") and "." not in point.name


def label_operations(names: Iterable[str]) -> Labels:
    """Label the operations of a function without source, by name only."""
    labels = Labels()
    for name in names:
        labels.mention(None, "/", name)
    return labels


def traced_labels(trace: Trace, reading: Reading | None, helper: str | None) -> Labels:
    """Label what ran."""
    labels = Labels(helper)
    known = {} if reading is None else reading.names
    prefix = "" if helper is None else f"{helper}."
    numbers: dict[tuple[str, str], set[int]] = {}
    for event in trace.events:
        inside = event.inside
        assert inside.number is not None
        numbers.setdefault((inside.mark, inside.name), set()).add(inside.number)
    for event in _once(trace.events):
        inside = event.inside
        name = inside.name.removeprefix(prefix) if inside.mark == "@" else inside.name
        line = None if reading is None else _line_in(reading, event.spots)
        if inside.mark == "@":
            if reading is None or name not in known or prefix + name != inside.name:
                continue
            line = _point_line(known[name], line or reading.first_line)
        elif reading is not None and line is None:
            if helper is not None:
                continue
            line = reading.first_line  # a decorator's
        elif helper is not None and not (reading and _is_entered(reading, event.spots)):
            continue  # the same function, called under another name
        mention = labels.mention(line, inside.mark, name)
        mention.looks[event.look] = None
        mention.times[event.visit] += 1
        if len(numbers[inside.mark, inside.name]) > 1:
            assert inside.number is not None
            mention.numbers.append(inside.number)
        mention.is_single = len(set(mention.numbers)) < 2
    for point in () if reading is None else reading.points:
        if not labels.has(point.line, point.name):
            labels.mention(point.line, "@", point.name).has_run = False
        labels.mention(point.line, "@", point.name).is_main |= _is_main(point)
    return labels


def _once(events: list[Event]) -> Iterator[Event]:
    """Leave out the second name of what changes a tensor in place: `/add` beside `/add_`."""
    for event, following in zip(events, [*events[1:], None], strict=True):
        if following is not None and following.inside.mark == event.inside.mark == "/":
            is_same = following.inside.name == f"{event.inside.name}_"
            if is_same and following.spots == event.spots:
                continue
        yield event


def _line_in(reading: Reading, spots: Iterable[Spot]) -> int | None:
    """Find the line of a function that led to a value."""
    return next((spot.line for spot in spots if _is_in(reading, spot)), None)


def _is_entered(reading: Reading, spots: Iterable[Spot]) -> bool:
    """Tell whether a value comes from the call that is listened inside of."""
    return any(spot.is_tapped for spot in spots if _is_in(reading, spot))


def _is_in(reading: Reading, spot: Spot) -> bool:
    is_between = reading.first_line <= spot.first_line <= reading.last_line
    return is_between and spot.file == reading.file


def _point_line(points: list[Point], line: int) -> int:
    """Find the line of the assignment that ran at a line, which its value may stand below."""
    lines = [point.line for point in points]
    return max((one for one in lines if one <= line), default=lines[0])
