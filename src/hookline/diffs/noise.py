"""What differs without meaning: values that are nothing but rounding.

The bias before a normalisation, or that of the keys in an attention, has a gradient that is zero
in exact arithmetic. What is computed of it is the rest of a sum that cancels, and two runs that
agree in everything have rests with nothing in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hookline.diffs.gaps import Gaps
from hookline.diffs.phases import PARAMETER_GRADIENT, STATE, UPDATE, Pair
from hookline.diffs.tolerances import (
    CANCELLED,
    CANCELLING_UNITS,
    EXACT,
    NOISE_UNITS,
    UPDATE_ROOT,
    WEIGHT_UNITS,
    Limits,
)
from hookline.stats.rows import FINITE, MAX, MIN, derive

if TYPE_CHECKING:
    from hookline.diffs.tracing_back import Ancestry

_END, _HALF_END = 1e30, 6e4
"""From where on a number is the end of its dtype, not a quantity."""


class Allowance:
    """Tell which differences past their limits are noise, in one step."""

    def __init__(
        self, pairs: Sequence[Pair], ancestry: Ancestry, *, gaps: Gaps, limits: Limits
    ) -> None:
        self.pairs = pairs
        self.ancestry = ancestry
        self.gaps = gaps
        self.limits = limits
        self._rows = gaps.sizes[0].rows
        self._rms = derive(self._rows, "rms")
        self._l2 = derive(self._rows, "l2")
        self._known: dict[int, bool] = {}

    def is_noise(self, pair: Pair) -> bool:
        """Tell whether a difference is no more than what rounding leaves of a sum."""
        if pair.place not in self._known:
            self._known[pair.place] = self._find(pair)
        return self._known[pair.place]

    def widen(self, pair: Pair, limit: float) -> float:
        """Give the limit of an update, which follows from its gradient's error."""
        if pair.phase != UPDATE or self.limits.is_given[pair.place]:
            return limit
        at = pair.place
        weight, gradient = self._owners(pair)
        if gradient is not None and not math.isnan(self.gaps.r[gradient.place]):
            error = max(float(self.gaps.r[gradient.place]), float(self.limits.usual[at]))
            limit = max(limit, UPDATE_ROOT * math.sqrt(error))
        norm = float(self.gaps.norms[at])
        if weight is not None and norm > 0:
            size = float(self.gaps.norms[weight.place])
            limit = max(limit, WEIGHT_UNITS * float(self.limits.units[at]) * size / norm)
        return limit

    def _find(self, pair: Pair) -> bool:
        distance = float(self.gaps.distances[pair.place])
        if not math.isfinite(distance) or self.limits.precisions[pair.place] == EXACT:
            return False
        if pair.phase == UPDATE:
            _, gradient = self._owners(pair)
            return gradient is not None and self._passed_as_noise(gradient)
        if pair.phase == STATE:
            return False
        if pair.phase == PARAMETER_GRADIENT:
            return self._is_rest_of_gradient(pair, distance)
        return self._is_rest(pair, distance)

    def _passed_as_noise(self, pair: Pair) -> bool:
        r = self.gaps.r[pair.place]
        return bool(r > self.limits.limits[pair.place]) and self.is_noise(pair)

    def _owners(self, pair: Pair) -> tuple[Pair | None, Pair | None]:
        """Find the parameter of an update and its gradient."""
        found = self.ancestry.predecessors(pair)
        weight = next((one for one in found if one.phase == STATE), None)
        return weight, next((one for one in found if one.phase == PARAMETER_GRADIENT), None)

    def _is_rest_of_gradient(self, pair: Pair, distance: float) -> bool:
        """Tell whether a parameter's gradient differs by the rounding of its sum alone."""
        site = pair.a
        sent = given = 0.0
        rows = 1.0
        for other in self.ancestry.trace.sites:
            if other.module != site.module:
                continue
            size = float(self._l2[other.id])
            if math.isnan(size):
                continue
            if other.kind == "gradient" and other.port == "output":
                sent = math.hypot(sent, size)
                count = float(self._rows[other.id, FINITE])
                rows = max(rows, count / max(1, math.prod(site.shape[:1])))
            elif other.kind == "value" and other.port == "input":
                given = math.hypot(given, size)
        unit = float(self.limits.units[pair.place])
        return distance <= NOISE_UNITS * unit * sent * max(math.sqrt(rows), given)

    def _is_rest(self, pair: Pair, distance: float) -> bool:
        """Tell whether a value is far smaller than what it was made of, and off by its rounding."""
        count = float(self._rows[pair.a.id, FINITE])
        if not count:
            return False
        kind = pair.a.kind
        # Where a sum cancels, at least one that has all its elements was as large as the rest.
        made_of = [
            float(self._rms[one.a.id])
            for one in self.ancestry.predecessors(pair)
            if one.a.kind == kind
            and math.prod(one.a.shape) >= math.prod(pair.a.shape)
            and not self._is_mask(one)
        ]
        size = max((one for one in made_of if not math.isnan(one)), default=0.0)
        own = float(np.nan_to_num(self._rms[pair.a.id]))
        unit = float(self.limits.units[pair.place])
        off = distance / math.sqrt(count)
        return own < CANCELLED * size and off <= CANCELLING_UNITS * unit * size

    def _is_mask(self, pair: Pair) -> bool:
        """Tell whether a value reaches the end of its dtype: it hides others, nothing sums it."""
        low, high = self._rows[pair.a.id, MIN], self._rows[pair.a.id, MAX]
        end = _HALF_END if pair.a.dtype == "float16" else _END
        return bool(max(-low, high) >= end)
