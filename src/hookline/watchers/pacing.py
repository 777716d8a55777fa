"""Which steps are watched, and what watching costs.

Every so many steps, or as many as a budget allows: then steps with and without the watch are timed
against each other, and the stride follows what was measured.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from dataclasses import dataclass

_WARM_UP = 2
"""Steps that are not timed: allocators and caches are filled in them."""

_LEAST_OF_EACH = 3
_REMEMBERED = 25
_MOST_STRIDE = 1000
_ROUNDING = 1e-9
_CHECK_AGAIN = 25
"""How often one step is left out to time it, where the budget allows every step."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What watching costs, as measured in this run."""

    steps: int
    """How many steps there were."""

    watched: int
    """How many of them were watched."""

    stride: int
    """One step in so many is watched now."""

    own_seconds: float
    """Seconds spent in hookline's own hooks for a watched step, without what a device does later:
    the median of the latest."""

    watched_seconds: float | None
    """The median duration of the latest watched steps; None before there is one."""

    plain_seconds: float | None
    """The same of steps that were not watched; None where there is none."""

    @property
    def ratio(self) -> float | None:
        """A watched step over a plain one; told from hookline's own time where all are watched."""
        if self.watched_seconds is None or self.watched_seconds <= 0:
            return None
        if self.plain_seconds:
            return self.watched_seconds / self.plain_seconds
        rest = self.watched_seconds - self.own_seconds
        return self.watched_seconds / rest if rest > 0 else None

    @property
    def overhead(self) -> float | None:
        """The share that watching adds to the whole run: 0.03 is three percent."""
        if self.ratio is None or not self.steps:
            return None
        return max(0.0, self.ratio - 1) * self.watched / self.steps

    def facts(self) -> dict[str, float | int | None]:
        """Write it so that JSON can hold it."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in (*names, "ratio", "overhead")}

    def __str__(self) -> str:
        if self.overhead is None or self.ratio is None:
            return f"watched {self.watched} of {self.steps} steps; too few to tell the cost"
        how = "against plain steps" if self.plain_seconds else "by hookline's own time"
        return (
            f"watched {self.watched} of {self.steps} steps; a watched step takes "
            f"{self.ratio:.3f}x ({how}), the whole run {1 + self.overhead:.3f}x"
        )


_EXTRA_SHARE = 0.02
"""What the extras may add to watched steps where their stride is left to the watch."""

_LEAST_EXTRA_STRIDE = 10
_MOST_EXTRA_STRIDE = 500


class Pace:
    """Decide step by step, and keep the times."""

    def __init__(self, every: int, budget: float | None) -> None:
        self._every = every
        self._budget = budget
        self._times: dict[bool, deque[float]] = {
            True: deque(maxlen=_REMEMBERED),
            False: deque(maxlen=_REMEMBERED),
        }
        self._own: deque[float] = deque(maxlen=_REMEMBERED)
        self._with_extras: deque[float] = deque(maxlen=_LEAST_OF_EACH)
        self.extra_stride = _LEAST_EXTRA_STRIDE
        """One watched step in so many has extras, where nobody said how many."""
        self._steps = self._watched = 0
        self._since = 0
        """Steps since the latest watched one."""
        self.stride = every

    def is_due(self, step: int) -> bool:
        """Tell whether a step is to be watched; asked once for each step, in order."""
        if self._budget is None:
            return step % self._every == 0
        self._since += 1
        if min(map(len, self._times.values())) < _LEAST_OF_EACH:
            due = step % max(2, self._every) == 0  # in turn, to learn what it costs
        elif self.stride == 1:
            due = step % _CHECK_AGAIN != 0
        else:
            due = self._since >= self.stride
        if due:
            self._since = 0
        return due

    def add(
        self, seconds: float, own_seconds: float, *, was_watched: bool, had_extras: bool = False
    ) -> None:
        """Take the time of a step that ended."""
        self._steps += 1
        self._watched += was_watched
        if self._steps <= _WARM_UP:
            return
        if had_extras:  # these are told apart: they would say too much of the others
            self._with_extras.append(seconds)
            self._choose_extra_stride()
            return
        self._times[was_watched].append(seconds)
        if was_watched:
            self._own.append(own_seconds)
        if self._budget is not None and min(map(len, self._times.values())) >= _LEAST_OF_EACH:
            self.stride = max(self._every, self._affordable(self._budget))

    def _choose_extra_stride(self) -> None:
        if len(self._times[True]) >= _LEAST_OF_EACH:
            usual = statistics.median(self._times[True])
            added = statistics.median(self._with_extras) - usual
            wanted = math.ceil(added / usual / _EXTRA_SHARE) if usual > 0 else 0
            self.extra_stride = min(max(wanted, _LEAST_EXTRA_STRIDE), _MOST_EXTRA_STRIDE)

    def _affordable(self, budget: float) -> int:
        plain = statistics.median(self._times[False])
        added = max(statistics.median(self._times[True]) - plain, statistics.median(self._own))
        if plain <= 0:
            return self._every
        # A cost that is the budget to the last bit, or just past it, fits.
        return min(_MOST_STRIDE, math.ceil(added / plain / budget - _ROUNDING))

    def cost(self) -> Cost:
        """Say what was measured so far."""
        times = {
            watched: statistics.median(each) if each else None
            for watched, each in self._times.items()
        }
        own = statistics.median(self._own) if self._own else 0.0
        return Cost(self._steps, self._watched, self.stride, own, times[True], times[False])
