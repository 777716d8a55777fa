"""How far apart the two sides of every pair are: from tensors where both kept them, or estimated.

Of tensors never more than two are held at a time, the pieces of a group put together among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hookline.diffs.matches import Match
from hookline.diffs.measuring import Gap, divide_all, estimate_gaps, measure_gap
from hookline.diffs.phases import Pair
from hookline.diffs.tolerances import EXACT, read_precision
from hookline.diffs.traces import Measurements, Trace, TraceSite
from hookline.stats.rows import MAX, MIN, merge_rows

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Floats = npt.NDArray[np.float64]

TENSOR, SKETCH, STATISTICS = "tensor", "sketch", "statistics"


@dataclass(slots=True, eq=False)
class Gaps:
    """Hold for each pair how far apart its sides are in one step."""

    distances: Floats
    """The norms of the differences; NaN where nothing was measured."""

    norms: Floats
    """The norms of the first side."""

    r: Floats
    """The relative errors."""

    measured: list[str]
    """What each is from; empty where nothing was measured."""

    sizes: tuple[Measurements, Measurements]
    """What was measured on both sides, by site."""


class PairMeasurer:
    """Measure the same pairs step by step."""

    def __init__(self, traces: tuple[Trace, Trace], pairs: Sequence[Pair]) -> None:
        self.traces = traces
        self.pairs = pairs
        there = [pair for pair in pairs if not pair.missing]
        plain = [pair for pair in there if not pair.match.is_group]
        self._groups = [pair for pair in there if pair.match.is_group]
        self._missing = [pair for pair in pairs if pair.missing]
        self._places = np.array([pair.place for pair in plain], int)
        self._sites = (
            np.array([pair.match.a[0] for pair in plain], int),
            np.array([pair.match.b[0] for pair in plain], int),
        )
        # Of a transposed tensor the sketch is another.
        self._is_turned = np.array([pair.match.how == "transposed" for pair in plain], bool)
        self._is_other = np.array(
            [not pair.missing and _is_number(pair.a) != _is_number(pair.b) for pair in pairs], bool
        )
        self._is_whole = np.array(
            [not (_is_number(pair.a) or _is_number(pair.b)) for pair in plain], bool
        )
        self._is_cut = np.array([pair.place for pair in there if _is_cut(pair)], int)
        self._roots = {
            pair.place: (_find_root(traces[0], pair.match.a), _find_root(traces[1], pair.match.b))
            for pair in there
        }

    def measure(self, steps: tuple[int, int], *, tensors: bool = True) -> Gaps:
        """Measure all pairs in one step; without tensors by their statistics and sketches."""
        count = len(self.pairs)
        both = self.traces[0].measurements(steps[0]), self.traces[1].measurements(steps[1])
        distances, norms = np.full(count, np.nan), np.full(count, np.nan)
        gaps = Gaps(distances, norms, distances, [""] * count, both)
        self._estimate(gaps)
        for pair in self._missing:
            _put_missing(pair, gaps)
        is_kept = (trace.has_tensors(step) for trace, step in zip(self.traces, steps, strict=True))
        if tensors and all(is_kept):
            self._measure_tensors(gaps, steps)
        # A mask of numbers here and of flags there say the same in ways that no number compares.
        distances[self._is_other & (distances != 0)] = np.nan
        distances[self._is_cut[~np.isnan(distances[self._is_cut])]] = np.inf
        gaps.r = divide_all(distances, norms)
        return gaps

    def _estimate(self, gaps: Gaps) -> None:
        """Estimate the pairs from what was measured of them."""
        places = self._places
        if len(places):
            own = self._sites
            rows = gaps.sizes[0].rows[own[0]], gaps.sizes[1].rows[own[1]]
            sketches = gaps.sizes[0].sketches[own[0]], gaps.sizes[1].sketches[own[1]]
            sketches[0][self._is_turned] = np.nan
            gaps.distances[places], gaps.norms[places] = estimate_gaps(
                rows, sketches, is_whole=self._is_whole
            )
            has_sketch = ~(np.isnan(sketches[0]).all(axis=1) | np.isnan(sketches[1]).all(axis=1))
            is_there = ~np.isnan(gaps.distances[places])
            for place, seen in zip(places[is_there], has_sketch[is_there], strict=True):
                gaps.measured[place] = SKETCH if seen else STATISTICS
        for pair in self._groups:
            rows_of = [
                _merge(one.rows[list(ids)])
                for one, ids in zip(gaps.sizes, (pair.match.a, pair.match.b), strict=True)
            ]
            found, size = estimate_gaps((rows_of[0], rows_of[1]), None)
            gaps.distances[pair.place], gaps.norms[pair.place] = found[0], size[0]
            gaps.measured[pair.place] = "" if np.isnan(found[0]) else STATISTICS

    def _measure_tensors(self, gaps: Gaps, steps: tuple[int, int]) -> None:
        """Measure the pairs whose tensors are there."""
        known: dict[tuple[int, int], Gap] = {}
        for pair in self.pairs:
            if pair.missing:
                continue
            key = self._roots[pair.place]
            gap = None if pair.match.is_group else known.get(key)
            if gap is None and pair.match.how == "same" and not pair.match.is_group:
                measured = self.traces[1].known_gap(key[1], self.traces[0], key[0])
                if measured is not None:
                    gap = known[key] = Gap(*measured)
            if gap is None:
                gap = self._measure_pair(pair.match, steps)
                if gap is None:
                    continue
                known[key] = gap
            gaps.distances[pair.place], gaps.norms[pair.place] = gap.distance, gap.norm
            gaps.measured[pair.place] = TENSOR

    def _measure_pair(self, match: Match, steps: tuple[int, int]) -> Gap | None:
        """Measure one pair; its tensors are let go before those of the next are read."""
        tensors = read_tensors(self.traces, match, steps)
        return None if tensors is None else measure_gap(*tensors)


def _is_number(site: TraceSite) -> bool:
    return not site.dtype or read_precision(site.dtype) != EXACT


def _is_cut(pair: Pair) -> bool:
    """Tell whether two without elements would have others if there were some."""
    sizes = [math.prod(one or 1 for one in site.shape) for site in (pair.a, pair.b)]
    is_empty = 0 in pair.a.shape and 0 in pair.b.shape
    return is_empty and sizes[0] != sizes[1] and not pair.match.is_group


def _merge(rows: Floats) -> Floats:
    """Merge the rows of the pieces of a group; NaN where one was not measured."""
    if np.isnan(rows[:, 0]).any():
        return np.full((1, rows.shape[1]), np.nan)
    return merge_rows(rows, [0] * len(rows), 1)


def _put_missing(pair: Pair, gaps: Gaps) -> None:
    """Call what one side lacks infinitely far away, where the other has it in this step."""
    side, site = (0, pair.a.id) if pair.missing == "b" else (1, pair.b.id)
    measured = gaps.sizes[side]
    if measured.is_there[site]:
        # A gradient of nothing but zeros is as good as none.
        is_zero = pair.kind != "value" and measured.rows[site, MIN] == measured.rows[site, MAX] == 0
        gaps.distances[pair.place] = 0.0 if is_zero else np.inf
        gaps.norms[pair.place] = 0.0


def _find_root(trace: Trace, sites: tuple[int, ...]) -> int:
    site = trace.sites[sites[0]]
    return site.id if site.same_as is None else site.same_as


def read_tensors(
    traces: tuple[Trace, Trace], match: Match, steps: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """Read both sides of a match, laid on one another; None where one was not kept."""
    found = []
    for trace, ids, step in zip(traces, (match.a, match.b), steps, strict=True):
        tensor = _read_side(trace, ids, step, match.dim)
        if tensor is None:
            return None
        found.append(tensor)
    x, y = found
    if match.how == "transposed" and y.ndim == 2:
        y = _turn(x, y)
    return x, y


def _read_side(trace: Trace, ids: tuple[int, ...], step: int, dim: int | None) -> Tensor | None:
    pieces = []
    for number in ids:
        tensor = trace.tensor(number, step)
        if tensor is None:
            return None
        pieces.append(tensor)
    if len(pieces) == 1:
        return pieces[0]
    import torch

    try:
        return torch.cat(pieces, dim=dim or 0) if pieces else None
    except RuntimeError:  # shapes that do not fit: they were no group
        return None


def _turn(x: Tensor, y: Tensor) -> Tensor:
    """Transpose the second; of two square ones that fit as they are, leave it."""
    if x.shape == y.shape and measure_gap(x, y).r <= measure_gap(x, y.T).r:
        return y
    return y.T
