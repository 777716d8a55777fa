"""What rules remember: the latest measurements of every site, and how the loss went."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from hookline.runs.step_sources import Flags, Floats


class Window:
    """Keep the last `length` values of each site, and their medians."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._values: Floats = np.full((length, 0), np.nan)
        self.counts = np.zeros(0, np.int64)
        """How many values each site has had."""

    def add(self, values: Floats) -> None:
        """Take the values of a step by site id; NaN where a site was not measured."""
        self._grow(len(values))
        at = np.flatnonzero(~np.isnan(values))
        self._values[self.counts[at] % self.length, at] = values[at]
        self.counts[at] += 1

    def medians(self) -> Floats:
        """Give the median of each site whose window is full; NaN for the others."""
        found = np.full(len(self.counts), np.nan)
        full = np.flatnonzero(self.is_full)
        if len(full):
            found[full] = np.median(self._values[:, full], axis=0)
        return found

    def least(self) -> Floats:
        """Give the smallest value of each site whose window is full; NaN for the others."""
        return np.where(self.is_full, self._values.min(axis=0), np.nan)

    def most(self) -> Floats:
        """Give the largest value of each site whose window is full; NaN for the others."""
        return np.where(self.is_full, self._values.max(axis=0), np.nan)

    @property
    def is_full(self) -> Flags:
        """Which sites have had as many values as the window holds."""
        return np.asarray(self.counts >= self.length)

    def _grow(self, count: int) -> None:
        missing = count - len(self.counts)
        if missing > 0:
            self._values = np.pad(self._values, ((0, 0), (0, missing)), constant_values=np.nan)
            self.counts = np.pad(self.counts, (0, missing))


class LossTrend:
    """Tell whether a training learns: its loss now against the first one."""

    def __init__(self) -> None:
        self._first = np.nan
        self._latest: deque[float] = deque(maxlen=5)

    def add(self, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        loss = scalars.get("loss", np.nan)
        self._first = loss if np.isnan(self._first) else self._first
        self._latest.append(loss)

    @property
    def is_known(self) -> bool:
        """Whether there is a loss, and one that zero is the best of."""
        return self._first > 0 and self.recent > 0

    @property
    def recent(self) -> float:
        """The loss now, as the median of five steps; NaN where it is not known."""
        return float(np.median(self._latest)) if self._latest else np.nan

    def is_below(self, share: float) -> bool:
        """Tell whether the loss, as the median of five steps, is below a share of the first."""
        return self.recent < share * self._first


def grow(values: Floats, count: int, fill: float = np.nan) -> Floats:
    """Give an array by site as many places as there are sites now."""
    missing = count - len(values)
    return np.pad(values, (0, missing), constant_values=fill) if missing > 0 else values
