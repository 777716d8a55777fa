"""The pairs of an alignment in the order in which they are judged.

Forward, then gradients as they arrive, then what the model keeps, the gradients of parameters and
the updates. A gradient that one side has and the other lacks is a pair too: that it is missing is
the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hookline.diffs.matches import Alignment, Match
from hookline.diffs.traces import Trace, TraceSite

FORWARD, BACKWARD, STATE, PARAMETER_GRADIENT, UPDATE = range(5)
"""The phases of a step, in the order of judging."""

PHASES = {
    "value": FORWARD,
    "gradient": BACKWARD,
    "buffer": STATE,
    "parameter": STATE,
    "parameter gradient": PARAMETER_GRADIENT,
    "update": UPDATE,
}
"""The phase of each kind of site."""

DIRECTIONS = ("forward", "backward", "state", "parameter gradient", "update")
"""What each phase is called in a result."""


_Keyed: TypeAlias = tuple[tuple[int, float], Match, TraceSite, TraceSite, str]
"""Where a pair stands, its match, its two sites, and the side that lacks it."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Hold two sites that are compared."""

    place: int
    """Its place among the pairs."""

    match: Match
    """How they were matched."""

    a: TraceSite
    """The site of the first side; where that lacks it, the other's."""

    b: TraceSite
    """The site of the second side; where that lacks it, the other's."""

    phase: int
    """One of the phases above."""

    missing: str = ""
    """The side that lacks it: `a`, `b`, or empty."""

    @property
    def own(self) -> TraceSite:
        """The site itself, of the first side where that has it."""
        return self.b if self.missing == "a" else self.a

    @property
    def kind(self) -> str:
        """What it is."""
        return self.own.kind

    @property
    def value(self) -> int:
        """The site of the first side that a gradient or an update belongs to."""
        return self.a.id if self.missing == "a" or self.a.of is None else self.a.of

    @property
    def is_early_state(self) -> bool:
        """Tell whether it is a parameter or buffer as it was before the step."""
        is_after = self.a.more.get("after") or self.b.more.get("after")
        return self.phase == STATE and not is_after


def make_pairs(traces: tuple[Trace, Trace], alignment: Alignment) -> list[Pair]:
    """Bring the matches into the order of judging, with what is missing on one side."""
    a, b = traces
    keyed: list[_Keyed] = []
    visits = _count_visits(a), _count_visits(b)
    for match in alignment.matches:
        first, second = a.sites[match.a[0]], b.sites[match.b[0]]
        phase = PHASES.get(first.kind)
        # What one side makes once and the other again for each piece of the batch has its
        # gradient in pieces there.
        is_piece = visits[0].get(first.module) != visits[1].get(second.module)
        if phase is None or (phase == BACKWARD and is_piece and not match.is_group):
            continue
        keyed.append(((phase, float(match.a[-1])), match, first, second, ""))
    keyed.extend(_find_missing(traces, alignment))
    keyed.extend(_find_lacking(traces, alignment))
    keyed.extend(_find_unchanged(traces, alignment))
    keyed.sort(key=lambda one: one[0])
    return [
        Pair(place, match, first, second, key[0], side)
        for place, (key, match, first, second, side) in enumerate(keyed)
    ]


def _count_visits(trace: Trace) -> dict[str, int]:
    found: dict[str, int] = {}
    for site in trace.sites:
        if site.kind == "value":
            found[site.module] = max(found.get(site.module, 0), site.visit + 1)
    return found


def _find_missing(traces: tuple[Trace, Trace], alignment: Alignment) -> Iterator[_Keyed]:
    """Find what follows a matched value or parameter on one side alone."""
    for side in (0, 1):
        own, other = traces[side], traces[1 - side]
        match_of = {one: match for match in alignment.matches for one in (match.a, match.b)[side]}
        moments = _find_moments(own, match_of, side)
        known = _find_known(other)
        for site in own.sites:
            owner = match_of.get(-1 if site.of is None else site.of)
            if owner is None or owner.is_group or site.of is None or site.id in match_of:
                continue
            value = own.sites[site.of]
            there = other.sites[(owner.b, owner.a)[side][0]]
            if not PHASES.get(site.kind) or not _is_wanted(site, value, there, known):
                continue
            key = PHASES[site.kind], moments[site.id]
            if side == 0:
                yield key, Match((site.id,), (), owner.rule, owner.how), site, there, "b"
            else:
                yield key, Match((), (site.id,), owner.rule, owner.how), there, site, "a"


def _find_lacking(traces: tuple[Trace, Trace], alignment: Alignment) -> Iterator[_Keyed]:
    """Find the outputs that the model gives on one side alone.

    What a module inside gives and nobody uses is no difference: attention that was not asked for.
    """
    for side, site in list_lacking(traces, alignment):
        if site.port != "output" or site.module:
            continue
        own, other = traces[side], traces[1 - side]
        names = alignment.names if side == 0 else {b: a for a, b in alignment.names.items()}
        # Something of the same execution stands for what is not there, an output if there is one.
        found = [
            one
            for one in other.sites
            if one.kind == "value" and one.module == names[site.module] and one.visit == site.visit
        ]
        there = next((one for one in found if one.port == "output"), found[0])
        match_of = {one: match for match in alignment.matches for one in (match.a, match.b)[side]}
        key = FORWARD, _find_moments(own, match_of, side)[site.id]
        if side == 0:
            yield key, Match((site.id,), (), "name"), site, there, "b"
        else:
            yield key, Match((), (site.id,), "name"), there, site, "a"


def list_lacking(
    traces: tuple[Trace, Trace], alignment: Alignment
) -> Iterator[tuple[int, TraceSite]]:
    """List what comes into or out of a module on one side alone, with the side that has it.

    Of modules of one class that ran as often on both sides: others may give more than is used.
    """
    visits = _count_visits(traces[0]), _count_visits(traces[1])
    types = [
        {one.module: one.type for one in trace.sites if one.kind == "value"} for trace in traces
    ]
    known = (
        {one for match in alignment.matches for one in match.a},
        {one for match in alignment.matches for one in match.b},
    )
    ports = [{one.port for one in trace.sites if one.kind == "value"} for trace in traces]
    for side in (0, 1):
        names = alignment.names if side == 0 else {b: a for a, b in alignment.names.items()}
        for site in traces[side].sites:
            other = names.get(site.module)
            if site.kind != "value" or site.id in known[side] or other is None:
                continue
            is_one = types[side][site.module] == types[1 - side].get(other)
            is_as_often = visits[side][site.module] == visits[1 - side].get(other)
            # A watch has no inputs: what ran without outputs is not to be seen there.
            is_seen = {"input", "output"} <= ports[1 - side]
            if is_one and is_as_often and is_seen:
                yield side, site


def _find_unchanged(traces: tuple[Trace, Trace], alignment: Alignment) -> Iterator[_Keyed]:
    """Pair a buffer after the step with that of a side where the step did not change it."""
    a, b = traces
    for side, own in enumerate(traces):
        match_of = {one: match for match in alignment.matches for one in (match.a, match.b)[side]}
        before = {
            (site.module, site.leaf): site.id
            for site in own.sites
            if site.kind == "buffer" and not site.more.get("after")
        }
        for site in own.sites:
            if site.kind != "buffer" or not site.more.get("after") or site.id in match_of:
                continue
            match = match_of.get(before.get((site.module, site.leaf), -1))
            if match is None or match.is_group:
                continue
            pair = (site.id, match.b[0]) if side == 0 else (match.a[0], site.id)
            new = Match((pair[0],), (pair[1],), match.rule, match.how)
            yield (
                (STATE, float(len(a.sites) + site.id)),
                new,
                a.sites[pair[0]],
                b.sites[pair[1]],
                "",
            )


def _find_moments(trace: Trace, match_of: Mapping[int, Match], side: int) -> list[float]:
    """Place each site in the order of the first side: after what came before it on its own."""
    if side == 0:
        return [float(site.id) for site in trace.sites]
    moments = []
    last = dict.fromkeys(range(len(DIRECTIONS)), -1.0)
    for site in trace.sites:
        phase = PHASES.get(site.kind, FORWARD)
        if site.id in match_of:
            last[phase] = max(last[phase], float(match_of[site.id].a[-1]))
        moments.append(last[phase] + 0.5)
    return moments


def _find_known(trace: Trace) -> set[tuple[str, bool, int | None]]:
    """List what each value and parameter has: kind, whether a part, and of what; None: of any."""
    found: set[tuple[str, bool, int | None]] = set()
    for site in trace.sites:
        if site.of is not None:
            of = _find_tensor(trace.sites[site.of], is_part=site.is_part)
            found |= {(site.kind, site.is_part, of), (site.kind, site.is_part, None)}
    return found


def _find_tensor(value: TraceSite, *, is_part: bool) -> int:
    """A total gradient is that of the tensor, wherever it is shown; a part is of one place."""
    return value.id if is_part or value.same_as is None else value.same_as


def _is_wanted(
    site: TraceSite,
    value: TraceSite,
    there: TraceSite,
    known: set[tuple[str, bool, int | None]],
) -> bool:
    """Tell whether the other side should have had this, and has not."""
    if site.more.get("arrival"):
        return False  # a second backward: the gradients of parameters tell
    if (site.kind, site.is_part, None) not in known:
        return False
    if site.kind != "gradient":
        return True
    # Without grad, as inside a checkpoint, nothing can arrive and nothing is missing.
    if value.requires_grad is not True or there.requires_grad is not True:
        return False
    tensor = _find_tensor(there, is_part=site.is_part)
    return (site.kind, site.is_part, tensor) not in known
