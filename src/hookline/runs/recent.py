"""The last steps in memory, read as a run on disk is read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from hookline.runs.history import History
from hookline.runs.records import SiteFacts, StepRecord
from hookline.runs.step_sources import (
    Array,
    Flags,
    Integers,
    ScalarColumns,
    StepIndex,
    keep_current,
    make_values,
)


class RecentSteps(History):
    """Keep the last `limit` steps; one thread may write while others read."""

    def __init__(self, limit: int = 100, *, rank: int = 0) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit} keeps nothing; keep one step at least")
        self._ring = _Ring(limit, rank)

    @property
    def limit(self) -> int:
        """How many steps are kept."""
        return self._ring.limit

    def add_sites(self, sites: Iterable[SiteFacts]) -> None:
        """Say what sites are, with ids that count on from 0."""
        self._ring.add_sites(sites)

    def write(self, step: StepRecord) -> None:
        """Keep one step, and drop the oldest where there are too many."""
        self._ring.write(step)

    def _sources(self) -> Sequence[_Ring]:
        return [self._ring]


class _Ring:
    """A source of the steps that are kept."""

    def __init__(self, limit: int, rank: int) -> None:
        self.limit = limit
        self.rank = rank
        self._lock = threading.Lock()
        self._sites: list[SiteFacts] = []
        self._steps: deque[tuple[int, StepRecord]] = deque(maxlen=limit)
        self._count = 0

    def add_sites(self, sites: Iterable[SiteFacts]) -> None:
        for site in sites:
            if site.id != len(self._sites):
                raise ValueError(
                    f"the site `{site.address}` has the id {site.id}; the next id is "
                    f"{len(self._sites)}, since sites count from 0 on"
                )
            self._sites.append(site)

    def write(self, step: StepRecord) -> None:
        with self._lock:
            self._steps.append((self._count, step))
            self._count += 1

    def index(self) -> StepIndex:
        steps = self._list()
        return keep_current(
            [step.step for _, step in steps],
            [key for key, _ in steps],
            [step.time for _, step in steps],
            [np.nan if step.seconds is None else step.seconds for _, step in steps],
        )

    def sites(self) -> Sequence[SiteFacts]:
        return list(self._sites)

    def read(self, kind: str, keys: Integers, *, sites: Integers) -> tuple[Array, Flags]:
        values, is_there = make_values(kind, len(keys), len(sites))
        place_of = np.full(len(self._sites) + 1, -1)  # the last for -1: a site that is not here
        place_of[sites] = np.arange(len(sites))
        place_of[-1] = -1
        number_of = {int(key): number for number, key in enumerate(keys)}
        for key, step in self._list():
            number = number_of.get(key)
            for block in step.blocks if number is not None else ():
                if block.kind == kind:
                    places = place_of[block.sites]
                    chosen = places >= 0
                    values[number, places[chosen]] = block.values[chosen]
                    is_there[number, places[chosen]] = True
        return values, is_there

    def scalars(self, keys: Integers) -> ScalarColumns:
        found = ScalarColumns(keys)
        for key, step in self._list():
            for name, value in step.scalars.items():
                found.add(key, name, value=value)
        return found

    def _list(self) -> list[tuple[int, StepRecord]]:
        with self._lock:
            return list(self._steps)
