"""Values of some sites that are measured together again and again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hookline.stats import Log
from hookline.watchers.sorting import Event

_OTHERS = 8
"""How often in a row values may come that are not as they were, before these count instead."""


class Batch:
    """Measure values as those before them were measured, and know where their rows belong.

    The rows of a step that is like the last one have the same numbers as there: then what is to be
    noted of them is there already.
    """

    __slots__ = ("_again", "_events", "_log", "_others", "_row", "sites")

    def __init__(self, log: Log, sites: Sequence[int], values: Sequence[Tensor]) -> None:
        self.sites = sites
        self._log = log
        self._again = log.repeat(values)
        self._others = 0
        self._row = -1
        self._events: list[Event] = []

    @property
    def can_repeat(self) -> bool:
        """Whether values like these can be measured for less than others."""
        return self._again is not None

    @property
    def is_outdated(self) -> bool:
        """Whether what comes has long been otherwise."""
        return self._others > _OTHERS

    def measure(self, values: Sequence[Tensor | None]) -> list[Event] | None:
        """Measure values like those it was made for; None where they are not."""
        row = -1 if self._again is None else self._again(values)  # type: ignore[arg-type]
        if row < 0:
            self._others += 1
            return None
        self._others = 0
        if row != self._row:
            assert self._again is not None
            offsets = self._again.offsets
            pairs = zip(self.sites, offsets, strict=True)
            self._events = [(site, row + offset, self._log) for site, offset in pairs]
            self._row = row
        return self._events
