"""Values of some sites that are measured together again and again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hookline.stats import Log, Repeat
from hookline.watchers.sorting import Event

_KINDS = 4
"""How many kinds of values are known of the same sites: of batches of several lengths, say."""

_MISSES = 8
"""How many values of other kinds come before one of these takes the place of a kind that is known.

To know a kind takes about as long as to measure a few of it the longer way.
"""


class Companions:
    """Measure values of the same sites as values like them were measured before.

    The rows of a step that is like the last one have the same numbers as there: then what is to be
    noted of them is there already.
    """

    __slots__ = ("_kinds", "_misses", "_room", "sites")

    def __init__(self, sites: Sequence[int]) -> None:
        self.sites = sites
        self._kinds: tuple[_Kind, ...] = ()
        """Those that are known, the one that came last before others."""
        self._room = _KINDS
        """How many more may be met before any is forgotten."""
        self._misses = 0

    def measure(self, values: Sequence[Tensor | None]) -> Sequence[Event] | None:
        """Measure values of a kind that is known; None where they are of no such kind."""
        for kind in self._kinds:
            events = kind.measure(values)
            if events is not None:
                if kind is not self._kinds[0]:
                    self._kinds = (kind, *(one for one in self._kinds if one is not kind))
                return events
        self._misses += 1
        return None

    def meet(self, log: Log, values: Sequence[Tensor]) -> None:
        """Know values like these from now on, if there is room and they can be measured so."""
        if self._room == 0 and self._misses <= _MISSES:
            return
        self._misses = 0
        self._room = max(0, self._room - 1)  # what cannot be measured so is not looked at forever
        again = log.repeat(values)
        if again is not None:
            self._kinds = (_Kind(self.sites, log, again), *self._kinds[: _KINDS - 1])


class _Kind:
    """Values that are alike in all but where they lie and what they hold."""

    __slots__ = ("_again", "_log", "_noted", "_sites")

    def __init__(self, sites: Sequence[int], log: Log, again: Repeat) -> None:
        self._sites = sites
        self._log = log
        self._again = again
        self._noted: tuple[int, Sequence[Event]] = (-1, ())
        """The first row of the values measured last, and which site each row belongs to."""

    def measure(self, values: Sequence[Tensor | None]) -> Sequence[Event] | None:
        row = self._again(values)
        if row < 0:
            return None
        noted, events = self._noted
        if row != noted:
            pairs = zip(self._sites, self._again.offsets, strict=True)
            events = [(site, row + offset, self._log) for site, offset in pairs]
            self._noted = row, events
        return events
