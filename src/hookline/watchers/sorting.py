"""From the rows of a step, in the order they were measured, to blocks by site."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline.runs import Block
from hookline.stats import Log, Measured
from hookline.stats.rows import derive, merge_rows

if TYPE_CHECKING:
    import numpy.typing as npt

Event = tuple[int, int, "Log"]
"""A site, a row, and the log that the row is in."""

UpdateEvent = tuple[int, int, int, "Log"]
"""An update's site, its row, the row of the weight before it, and the log of both."""


_MOST_KNOWN = 4
"""How many orders of events are remembered: steps that are looked at more closely have another."""


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """Events of a step, all in one log and one for each site, and how their rows are sorted."""

    events: Sequence[Event]
    """The events, in the order in which they came."""
    log: Log
    """Where all of them are."""
    sites: npt.NDArray[np.int32]
    """The sites, from the first number to the last."""
    rows: npt.NDArray[np.int64]
    """The row of each of these."""


class SiteSorter:
    """Bring the rows of a step into the order of their sites.

    Most steps measure the same sites in the same order as one before, each once: then what was
    found out for that one holds again.
    """

    def __init__(self) -> None:
        self._known: deque[_Order] = deque(maxlen=_MOST_KNOWN)

    def sort(self, events: Sequence[Event], measured: dict[Log, Measured]) -> list[Block]:
        """Merge what was measured of each site; sites keep the order of their numbers."""
        known = next((one for one in self._known if one.events == events), None)
        if known is not None:
            self._known.remove(known)
            self._known.appendleft(known)
            one = measured[known.log]
            if not len(one.sketched) and not len(one.counted):
                return [Block("rows", known.sites, one.rows[known.rows])]
        blocks = _sort_by_site(events, measured)
        if known is None:
            self._remember(events, blocks)
        return blocks

    def _remember(self, events: Sequence[Event], blocks: Sequence[Block]) -> None:
        logs = {log for _, _, log in events}
        if len(logs) != 1 or len(blocks) != 1 or len(blocks[0].sites) != len(events):
            return
        ordered = sorted((site, row) for site, row, _ in events)
        rows = np.array([row for _, row in ordered], dtype=np.int64)
        self._known.appendleft(_Order(events, logs.pop(), blocks[0].sites, rows))


def _sort_by_site(events: Sequence[Event], measured: dict[Log, Measured]) -> list[Block]:
    """Merge what was measured of each site, whatever comes how often."""
    parts: dict[str, list[tuple[Any, Any]]] = {}
    for log, one in measured.items():
        own = [(site, row) for site, row, where in events if where is log]
        if not own:
            continue
        sites, rows = np.array(own, dtype=np.int64).T
        parts.setdefault("rows", []).append((sites, one.rows[rows]))
        for kind, numbers, values in (
            ("sketch", one.sketched, one.sketches),
            ("counts", one.counted, one.counts),
            ("histogram", one.counted, one.histograms),
        ):
            if len(numbers):
                place = np.full(len(one.rows), -1)
                place[numbers] = np.arange(len(numbers))
                at = place[rows]
                parts.setdefault(kind, []).append((sites[at >= 0], values[at[at >= 0]]))
    return [_merge(kind, found) for kind, found in parts.items()]


def _merge(kind: str, found: list[tuple[Any, Any]]) -> Block:
    """Put together what several logs and visits gave of one kind."""
    values = np.concatenate([one[1] for one in found])
    unique, groups = np.unique(np.concatenate([one[0] for one in found]), return_inverse=True)
    if kind == "rows":
        merged = merge_rows(values, groups, len(unique))
    elif len(unique) == len(values):
        merged = np.empty_like(values)
        merged[groups] = values
    else:
        merged = np.zeros((len(unique), values.shape[1]), dtype=np.float64)
        np.add.at(merged, groups, values)
        merged = merged.astype(values.dtype)
    return Block(kind, unique.astype(np.int32), merged)


def sort_updates(updates: Sequence[UpdateEvent], measured: dict[Log, Measured]) -> Block:
    """Set each update beside the norm of the weight that it changed."""
    parts = []
    for log, one in measured.items():
        own = [(site, row, weight) for site, row, weight, where in updates if where is log]
        if own:
            sites, rows, weights = np.array(own, dtype=np.int64).T
            counts = one.updates[np.searchsorted(one.updated, rows)]
            norms = derive(one.rows[weights], "l2")
            parts.append((sites, np.column_stack((counts, norms))))
    sites, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    unique, first = np.unique(sites, return_index=True)
    return Block("updates", unique.astype(np.int32), values[first])
