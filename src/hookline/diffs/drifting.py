"""Trainings that part slowly: weights that differ already when a step begins.

Two trainings that round otherwise part for good: each step starts from weights that are further
apart, and everything in it is at least as far apart as they are. That is no difference of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hookline.diffs.gaps import Gaps
from hookline.diffs.phases import UPDATE, Pair
from hookline.diffs.tolerances import WEIGHT_UNITS, Limits
from hookline.diffs.wording import DRIFT
from hookline.diffs.writing import write_rough

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_TELLING_DRIFT = 10.0
"""A drift smaller than this many times rounding is not worth a word."""

_JUMP = 16.0
"""A site that was off before differs anew where it is this many times further off than ever."""


class Drift:
    """Measure how far the weights of two trainings are apart."""

    def __init__(self, pairs: Sequence[Pair], limits: Limits) -> None:
        kept = [pair for pair in pairs if pair.kind == "parameter" and not pair.missing]
        self._places = np.array([pair.place for pair in kept], int)
        updates = {
            pair.value: pair.place for pair in pairs if pair.phase == UPDATE and not pair.missing
        }
        self._updates = np.array([updates.get(pair.a.id, -1) for pair in kept], int)
        self._units = limits.units[self._places] if kept else np.empty(0)
        modules = {path: number for number, path in enumerate({one.a.module for one in kept})}
        self._groups = np.array([modules[pair.a.module] for pair in kept], int)
        usual = limits.usual[self._places] if kept else np.empty(0)
        self._usual = float(np.nanmax(usual, initial=0.0))
        self._largest: Floats = np.zeros(len(pairs))
        self._last = 0.0
        self._before: tuple[tuple[int, int], Gaps] | None = None

    def note(self, gaps: Gaps, steps: tuple[int, int]) -> None:
        """Learn how far off the sites of a step are that was found to agree."""
        self._largest = np.fmax(self._largest, gaps.r)
        self._before = steps, gaps

    def find_changed(self, gaps: Gaps, limits: Limits, steps: tuple[int, int]) -> frozenset[int]:
        """Find the parameters that the step before leaves closer together than this one finds them.

        Two weights are at most as far apart as they were and as their updates are. One that no
        optimizer moves may follow the others, as an average of them does.
        """
        if self._before is None or not len(self._places) or not (self._updates >= 0).any():
            return frozenset()
        (own, other), before = self._before
        if (steps[0] - own, steps[1] - other) != (1, 1):
            return frozenset()  # nobody saw the steps between
        is_moved = self._updates >= 0
        updates = np.where(is_moved, before.distances[self._updates], 0.0)
        size, now = gaps.norms[self._places], gaps.r[self._places]
        with np.errstate(invalid="ignore", divide="ignore"):
            known = (before.distances[self._places] + updates) / size + WEIGHT_UNITS * self._units
            is_explained = ~(now > np.fmax(_JUMP * known, limits.limits[self._places]))
        is_explained |= np.isnan(known)
        followed = float(np.nanmax(now[is_moved & is_explained], initial=0.0))
        is_explained |= ~is_moved & (now <= _JUMP * followed)
        return frozenset(int(place) for place in self._places[~is_explained])

    def widen(self, gaps: Gaps, limits: Limits, *, changed: frozenset[int] = frozenset()) -> Floats:
        """Give the limits of a later step.

        They are wider by as much as the weights at its start are further apart than rounding, but
        for those that were changed otherwise than by training. And what has drifted is anything
        but even from batch to batch, so a site must be far above what it was in the steps before.
        """
        self._last = self._find(gaps, changed)
        scale = max(1.0, self._last / self._usual) if self._usual else 1.0
        wide = np.fmax(scale * limits.limits, _JUMP * self._largest)
        return np.where(limits.is_given, limits.limits, wide)

    def describe(self, step: int) -> list[str]:
        """Say how far the weights have drifted at the end."""
        if self._last <= _TELLING_DRIFT * self._usual:
            return []
        return [f"{DRIFT}the weights are {write_rough(self._last)} apart by step {step}"]

    def _find(self, gaps: Gaps, changed: frozenset[int]) -> float:
        """Find the largest relative distance of a module's parameters.

        All parameters of a module together: a bias that is next to nothing weighs as little as it
        matters.
        """
        distances = gaps.distances[self._places]
        norms = gaps.norms[self._places]
        known = np.isfinite(distances) & np.isfinite(norms)
        known &= ~np.isin(self._places, list(changed))
        if not known.any():
            return 0.0
        groups = self._groups[known]
        apart = np.bincount(groups, weights=distances[known] ** 2)
        sizes = np.bincount(groups, weights=norms[known] ** 2)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.where(sizes > 0, np.sqrt(apart / sizes), 0.0)
        return float(found.max())
