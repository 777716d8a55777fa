"""The sites of two compared runs in one order: forward, backward, state, gradients, updates.

What only one side has stands where that side met it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hookline.diffs.difference import Difference, PairResult
from hookline.diffs.traces import Trace, TraceSite

SECTIONS = {
    "value": "forward",
    "gradient": "backward",
    "buffer": "state",
    "parameter": "state",
    "parameter gradient": "parameter gradient",
    "update": "update",
}
"""In which part of a report a kind of site is, in the order of the parts."""

_ORDER = list(dict.fromkeys(SECTIONS.values()))


@dataclass(frozen=True, slots=True)
class Row:
    """One pair, or what only one side has."""

    section: str
    """In which part of the report it is."""

    pair: PairResult | None
    """The pair; None where only one side has the site."""

    site: str
    """Its address, on the first side where both have it."""

    depth: int
    """How deep its module is."""

    visit: int = 0
    """Which execution of the module it belongs to."""

    is_a: bool = True
    """Of a site that stands alone, whether the first side has it."""

    found: TraceSite | None = None
    """What its own trace says of it, if that is still there."""

    found_b: TraceSite | None = None
    """The same of the second side."""


def order_rows(difference: Difference) -> list[Row]:
    """List pairs and lone sites by section, in the order of execution."""
    traces = difference.traces
    placed: list[tuple[tuple[float, ...], Row]] = []
    after: list[tuple[int, float]] = []
    for at, pair in enumerate(difference.pairs):
        key = float(pair.match.a[0]) if pair.match is not None else float(at)
        found = _find(traces, 0, pair.match.a if pair.match is not None else ())
        found_b = _find(traces, 1, pair.match.b if pair.match is not None else ())
        row = Row(
            SECTIONS.get(pair.kind, "forward"),
            pair,
            pair.site,
            measure_depth(pair.module),
            pair.visit,
            found=found,
            found_b=found_b,
        )
        placed.append(((key, 0.0, float(at)), row))
        if pair.match is not None:
            after.append((max(pair.match.b), key))
    after.sort()
    # What is missing on one side has a row as a pair already.
    listed = {name_visit(one.site, one.visit) for one in difference.pairs}
    alone_a = [one for one in difference.alone_a if one not in listed]
    listed = {name_visit(one.site_b, one.visit) for one in difference.pairs}
    alone_b = [one for one in difference.alone_b if one not in listed]
    for row, own in _list_alone(alone_a, traces[0] if traces else None, is_a=True):
        placed.append(((float("inf") if own is None else own, 1.0, 0.0), row))
    for row, own in _list_alone(alone_b, traces[1] if traces else None, is_a=False):
        # It comes after what the second side met before it.
        key = float("inf") if own is None else _last_before(after, own)
        placed.append(((key, 2.0, float(own or 0)), row))
    placed.sort(key=lambda one: (_ORDER.index(one[1].section), one[0]))
    return [row for _, row in placed]


def _find(traces: tuple[Trace, Trace] | None, side: int, ids: Sequence[int]) -> TraceSite | None:
    if traces is None or len(ids) != 1:
        return None
    return traces[side].sites[ids[0]]


def _list_alone(
    addresses: Sequence[str], trace: Trace | None, *, is_a: bool
) -> Iterator[tuple[Row, int | None]]:
    """List the sites that one side has alone, and their numbers there."""
    known: dict[str, TraceSite] = {}
    for site in trace.sites if trace is not None else ():
        known.setdefault(name_visit(site.address, site.visit), site)
        known.setdefault(site.address, site)
    for address in addresses:
        found = known.get(address)
        module = found.module if found is not None else address.partition(":")[0]
        yield (
            Row(
                SECTIONS.get(found.kind, "forward") if found is not None else "forward",
                None,
                address,
                measure_depth(module),
                found.visit if found is not None else 0,
                is_a=is_a,
                found=found,
            ),
            found.id if found is not None else None,
        )


def _last_before(after: Sequence[tuple[int, float]], own: int) -> float:
    """Find where on the first side the last pair is that the second side met before a site."""
    place = bisect_left(after, (own, -1.0))
    return after[place - 1][1] if place else -1.0


def measure_depth(module: str) -> int:
    """Count how deep a module is; the model itself is at 0."""
    return module.count(".") + 1 if module else 0


def name_visit(address: str, visit: int) -> str:
    """Name a site of one execution; the first needs no number."""
    return f"{address} #{visit}" if visit else address


def is_first(difference: Difference, pair: PairResult) -> bool:
    """Tell whether a pair is the first difference."""
    return pair.site == difference.site and pair.visit == difference.visit
