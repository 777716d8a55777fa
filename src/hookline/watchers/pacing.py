"""Which steps are watched, and what watching costs.

Every so many steps, or as many as a budget allows: then steps with and without the watch are timed
against each other, and the stride follows what was measured. What was spent to learn that is paid
back by watching nothing for a while, so that the run as a whole comes under the budget.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, deque
from dataclasses import dataclass

_WARM_UP = 2
"""Steps that are not timed: allocators and caches are filled in them."""

_LEAST_OF_EACH = 3
_REMEMBERED = 25
_MOST_STRIDE = 1000
_ROUNDING = 1e-9
_MOST_STRIDE_AFTER_FREE = 20
"""Who wants the start whole wants to know what comes after it, too."""

_FREE_SECONDS = 10.0
"""A start that is watched whatever it costs goes on until it has cost so much."""

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

    with_extras: int = 0
    """How many of the watched steps had extras: sketches, counts."""

    extras_seconds: float | None = None
    """The median duration of the latest of those; None before there is one."""

    @property
    def ratio(self) -> float | None:
        """A usual watched step over a plain one; told from hookline's own time where all are
        watched."""
        bare = self._bare_seconds
        return None if bare is None or self.watched_seconds is None else self.watched_seconds / bare

    @property
    def overhead(self) -> float | None:
        """The share that watching adds to the whole run, with the extras: 0.03 is three percent."""
        bare = self._bare_seconds
        if bare is None or self.watched_seconds is None or not self.steps:
            return None
        extras = self.watched_seconds if self.extras_seconds is None else self.extras_seconds
        usual = (self.watched - self.with_extras) * max(0.0, self.watched_seconds - bare)
        return (usual + self.with_extras * max(0.0, extras - bare)) / (self.steps * bare)

    @property
    def _bare_seconds(self) -> float | None:
        """How long a step takes without the watch; None where that cannot be told."""
        if self.watched_seconds is None or self.watched_seconds <= 0:
            return None
        bare = self.plain_seconds or self.watched_seconds - self.own_seconds
        return bare if bare > 0 else None

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


class _Durations:
    """The latest steps of one kind: how long they took, and hookline's own part of it."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._own: deque[float] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, seconds: float, own_seconds: float) -> None:
        self._seconds.append(seconds)
        self._own.append(own_seconds)

    @property
    def seconds(self) -> float:
        return statistics.median(self._seconds)

    @property
    def own_seconds(self) -> float:
        return statistics.median(self._own)


class Pace:
    """Decide step by step, and keep the times."""

    def __init__(self, *strides: int, budget: float | None = None, free: int = 0) -> None:
        self._strides = strides
        """A step that one of them meets is watched; where there is a budget there is one alone."""
        self._every = min(strides)
        self._budget = budget
        self._free = free if budget is not None else 0
        """Steps at the start that are watched whatever they cost."""
        self._is_free = self._free > 0
        self._own_total = 0.0
        self._most_stride = _MOST_STRIDE_AFTER_FREE if self._is_free else _MOST_STRIDE
        self._plain = _Durations()
        self._usual = _Durations()
        self._with_extras = _Durations()
        self.extra_stride = _LEAST_EXTRA_STRIDE
        """One watched step in so many has extras, where nobody said how many."""
        self._steps = 0
        self._watched = Counter[bool]()
        """How many steps were watched, without extras and with them."""
        self._unpaid = Counter[bool]()
        """Those of them that are not in `_spent` yet, since nobody knows what they cost."""
        self._spent = 0.0
        """What watching has cost so far, in plain steps."""
        self._since = 0
        """Steps since the latest watched one."""
        self.stride = self._every

    def is_due(self, step: int) -> bool:
        """Tell whether a step is to be watched; asked once for each step, in order."""
        if self._budget is None:
            return any(step % one == 0 for one in self._strides)
        self._since += 1
        if self._is_free:
            due = step % self._every == 0
        elif not self._has_learned:
            due = step % max(2, self._every) == 0  # in turn, to learn what it costs
        elif self._since >= self._most_stride:
            due = True
        elif not self._can_pay(self._budget):
            due = False
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
        if was_watched:
            self._watched[had_extras] += 1
            self._unpaid[had_extras] += not self._is_free
        self._own_total += own_seconds
        if self._is_free:
            self._free = max(self._free, self._steps)
            self._is_free = self._steps < self._free or self._own_total < _FREE_SECONDS
        if self._steps <= _WARM_UP:
            return
        if not was_watched:
            self._plain.add(seconds, own_seconds)
        elif had_extras:  # these are told apart: they would say too much of the others
            self._with_extras.add(seconds, own_seconds)
            self._choose_extra_stride()
        else:
            self._usual.add(seconds, own_seconds)
        if self._budget is not None and self._has_learned:
            self._spent += sum(count * self._added(had) for had, count in self._unpaid.items())
            self._unpaid.clear()
            # A cost that is the budget to the last bit, or just past it, fits.
            wanted = math.ceil(self._usually_added / self._budget - _ROUNDING)
            self.stride = max(self._every, min(self._most_stride, wanted))

    @property
    def _watched_times(self) -> _Durations:
        """The times of usual watched steps; where all of them have extras, that is usual."""
        return self._usual or self._with_extras

    @property
    def _has_learned(self) -> bool:
        return min(len(self._plain), len(self._watched_times)) >= _LEAST_OF_EACH

    def _added(self, had_extras: bool) -> float:
        """Tell what watching adds to a step, in plain steps."""
        times = (had_extras and self._with_extras) or self._watched_times
        plain = self._plain.seconds
        return max(times.seconds - plain, times.own_seconds) / plain if plain > 0 else 0.0

    @property
    def _usually_added(self) -> float:
        """What it adds to a watched step, extras weighted by how often they come."""
        total = self._watched.total()
        return sum(count * self._added(had) for had, count in self._watched.items()) / total

    def _can_pay(self, budget: float) -> bool:
        """Tell whether one more watched step leaves the run so far within the budget."""
        spent = self._spent + self._usually_added
        return spent <= budget * (self._steps + 1 - self._free) * (1 + _ROUNDING)

    def _choose_extra_stride(self) -> None:
        if len(self._usual) >= _LEAST_OF_EACH:
            usual = self._usual.seconds
            added = self._with_extras.seconds - usual
            wanted = math.ceil(added / usual / _EXTRA_SHARE) if usual > 0 else 0
            self.extra_stride = min(max(wanted, _LEAST_EXTRA_STRIDE), _MOST_EXTRA_STRIDE)

    def _time_extras(self, watched: _Durations) -> float:
        """Tell how long a step with extras takes; without plain steps, by hookline's own time.

        There are few of them: one that falls on a slow step of the training, such as one that
        compiles, would be taken for the cost of all.
        """
        extras = self._with_extras
        if self._plain:
            return extras.seconds
        return watched.seconds + max(0.0, extras.own_seconds - watched.own_seconds)

    def cost(self) -> Cost:
        """Say what was measured so far."""
        watched = self._watched_times
        return Cost(
            steps=self._steps,
            watched=self._watched.total(),
            stride=self.stride,
            own_seconds=watched.own_seconds if watched else 0.0,
            watched_seconds=watched.seconds if watched else None,
            plain_seconds=self._plain.seconds if self._plain else None,
            with_extras=self._watched[True],
            extras_seconds=self._time_extras(watched) if self._with_extras else None,
        )
