"""Trainings that part slowly: weights that differ already when a step begins.

Two trainings that round otherwise part for good: each step starts from weights that are further
apart, and everything in it is at least as far apart as they are. That is no difference of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hookline.diffs.gaps import Gaps
from hookline.diffs.phases import Pair
from hookline.diffs.tolerances import Limits
from hookline.diffs.writing import write_rough

if TYPE_CHECKING:
    import numpy.typing as npt

_TELLING_DRIFT = 10.0
"""A drift smaller than this many times rounding is not worth a word."""


class Drift:
    """Measure how far the weights of two trainings are apart."""

    def __init__(self, pairs: Sequence[Pair], limits: Limits) -> None:
        kept = [pair for pair in pairs if pair.kind == "parameter" and not pair.missing]
        self._places = np.array([pair.place for pair in kept], int)
        modules = {path: number for number, path in enumerate({one.a.module for one in kept})}
        self._groups = np.array([modules[pair.a.module] for pair in kept], int)
        usual = limits.usual[self._places] if kept else np.empty(0)
        self._usual = float(np.nanmax(usual, initial=0.0))
        self.seen: list[float] = []
        """The drift of each step that was measured."""

    def measure(self, gaps: Gaps) -> float:
        """Give by how much the limits of a step must be wider.

        All parameters of a module together: a bias that is next to nothing weighs as little as it
        matters.
        """
        drift = self._find(gaps)
        self.seen.append(drift)
        return max(1.0, drift / self._usual) if self._usual else 1.0

    def describe(self, steps: Sequence[int], scales: Sequence[float]) -> list[str]:
        """Say how far the weights have drifted at the end."""
        if not self.seen or not self._usual or scales[-1] < _TELLING_DRIFT:
            return []
        return [f"drift: the weights are {write_rough(self.seen[-1])} apart by step {steps[-1]}"]

    def _find(self, gaps: Gaps) -> float:
        distances: npt.NDArray[np.float64] = gaps.distances[self._places]
        norms = gaps.norms[self._places]
        known = np.isfinite(distances) & np.isfinite(norms)
        if not known.any():
            return 0.0
        groups = self._groups[known]
        apart = np.bincount(groups, weights=distances[known] ** 2)
        sizes = np.bincount(groups, weights=norms[known] ** 2)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.where(sizes > 0, np.sqrt(apart / sizes), 0.0)
        return float(found.max())
