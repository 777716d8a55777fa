"""Modules that write into what they are given, on one side alone or otherwise on each.

That is no difference by itself: mostly nobody reads the old value again. But where the code around
such a module goes wrong later, though all that it was given agrees, it may have read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hookline.diffs.gaps import PairMeasurer
from hookline.diffs.matches import Alignment, Match
from hookline.diffs.phases import FORWARD, Pair
from hookline.diffs.tolerances import TABLE, read_precision
from hookline.diffs.traces import Trace, TraceSite

_KIND = "overwritten"


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Say that a module leaves something else than the other side in the place of its input."""

    module: str
    """Its path on the first side."""

    module_b: str
    """Its path on the second side."""

    value: int
    """The site of the input on the first side."""

    moment: int
    """The last site of the module's execution on the first side."""

    address: str
    """The input, on the first side."""

    word: str
    """Which side writes."""


def find_overwrites(
    traces: tuple[Trace, Trace], alignment: Alignment, steps: tuple[int, int]
) -> list[Overwrite]:
    """Find the inputs that are not the same any more once a module ran, in the order of A."""
    a, b = traces
    if not any(site.kind == _KIND for trace in traces for site in trace.sites):
        return []
    matches = [one for one in alignment.matches if not one.is_group]
    partner = {one.a[0]: one.b[0] for one in matches}
    after_a, after_b = _index(a), _index(b)
    found: list[tuple[Pair, str]] = []
    for value, other in partner.items():
        if value not in after_a and other not in after_b:
            continue
        here, there = after_a.get(value, value), after_b.get(other, other)
        match = Match((here,), (there,), "name")
        pair = Pair(len(found), match, a.sites[here], b.sites[there], FORWARD)
        side = "here" if other not in after_b else "there" if value not in after_a else ""
        found.append((pair, f"writes into its input {side}" if side else "writes otherwise"))
    gaps = PairMeasurer(traces, [pair for pair, _ in found]).measure(steps)
    ends = _find_ends(a)
    return [
        Overwrite(
            module=pair.a.module,
            module_b=pair.b.module,
            value=pair.a.id if pair.a.kind != _KIND or pair.a.of is None else pair.a.of,
            moment=ends[pair.a.module, pair.a.visit],
            address=pair.a.address,
            word=word,
        )
        for pair, word in found
        if gaps.r[pair.place] > TABLE[read_precision(pair.a.dtype)]
    ]


def _index(trace: Trace) -> dict[int, int]:
    """Give by the site of an input the one that shows it after the module wrote into it."""
    return {site.of: site.id for site in _list(trace) if site.of is not None}


def _list(trace: Trace) -> Iterator[TraceSite]:
    return (site for site in trace.sites if site.kind == _KIND)


def _find_ends(trace: Trace) -> Mapping[tuple[str, int], int]:
    """Give the last site of each execution of a module."""
    return {
        (site.module, site.visit): site.id for site in trace.sites if site.kind in ("value", _KIND)
    }
