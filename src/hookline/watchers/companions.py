"""Values of some sites that are measured together again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hookline._torch import is_nested
from hookline.stats import NOT_NOW, UNLIKE, Log, Repeat
from hookline.watchers.sorting import Event

_KINDS = 16
"""How many kinds of values are known of the same sites: of batches of several lengths, say."""

_PATIENCE, _MOST_PATIENCE = 8, 64
"""How many values of other kinds come, at first and at most, before one takes the place of a kind.

To know a kind takes about as long as to measure a few of it the longer way.
"""


class Companions:
    """Measure values of the same sites as values like them were measured before.

    The rows of a step that is like the last one have the same numbers as there: then what is to be
    noted of them is there already. Those that may have come together by chance are known from the
    second time on.
    """

    __slots__ = (
        "_came",
        "_kinds",
        "_latest",
        "_misses",
        "_needed",
        "_patience",
        "_room",
        "_told",
        "sites",
    )

    def __init__(self, sites: Sequence[int], *, by_chance: bool = False) -> None:
        self.sites = sites
        self._came = self._told = 0
        """How often they came, and how often they had when that was asked for."""
        self._needed = 2 if by_chance else 0
        """How often they have to come before any kind of them is known."""
        self._kinds: dict[Any, _Kind] = {}
        """Those that are known, the one met first before others."""
        self._latest: _Kind | None = None
        """The one that came last."""
        self._room = _KINDS
        """How many more may be met before any is forgotten."""
        self._misses, self._patience = 0, _PATIENCE

    def measure(self, values: Sequence[Tensor | None]) -> Sequence[Event] | None:
        """Measure values of a kind that is known; None where they are not, or cannot be now."""
        self._came += 1
        kind = self._latest
        if kind is not None:
            row = kind.again(values)
            if row >= 0:
                return kind.note(row)
            if row == NOT_NOW:
                return None
        first, last = values[0], values[-1]
        if first is None or last is None or is_nested(first) or is_nested(last):
            return None
        other = self._kinds.get(_mark(first, last))
        if other is None or other is kind:
            self._misses += 1
            return None
        row = other.again(values)
        if row >= 0:
            self._latest = other
            return other.note(row)
        self._misses += row == UNLIKE
        return None

    def meet(self, log: Log, values: Sequence[Tensor]) -> None:
        """Know values like these from now on, if there is room and they can be measured so."""
        is_full = self._room == 0 and self._misses <= self._patience
        if is_full or self._came < self._needed or any(map(is_nested, values)):
            return
        mark = _mark(values[0], values[-1])
        known = self._kinds.get(mark)
        if known is not None and known.again.is_like(values):
            return  # only not now
        self._misses = 0
        self._room = max(0, self._room - 1)  # what cannot be measured so is not looked at forever
        again = log.repeat(values)
        if again is not None:
            kinds = {key: kind for key, kind in self._kinds.items() if key != mark}
            dropped = [known] if known is not None else []
            if len(kinds) == _KINDS:
                dropped.append(kinds.pop(next(iter(kinds))))
            kinds[mark] = self._latest = _Kind(self.sites, log, again)
            self._kinds = kinds
            if not any(kind.uses <= _PATIENCE for kind in dropped):
                return
        # Nothing came of it, or of one before: the next is met after more of other kinds.
        self._patience = min(2 * self._patience, _MOST_PATIENCE)

    def comes_again(self) -> bool:
        """Tell whether they came several times since this was asked."""
        told, self._told = self._told, self._came
        return self._came - told > 1


def _mark(first: Tensor, last: Tensor) -> Any:
    """Give what a kind is found by: values whose marks differ are of several; none is nested."""
    return first.shape, last.shape, first.dtype, first.requires_grad


class _Kind:
    """Values that are alike in all but where they lie and what they hold."""

    __slots__ = ("_log", "_noted", "_sites", "again", "uses")

    def __init__(self, sites: Sequence[int], log: Log, again: Repeat) -> None:
        self._sites = sites
        self._log = log
        self.again = again
        """What measures them."""
        self.uses = 0
        """How often it did."""
        self._noted: tuple[int, Sequence[Event]] = (-1, ())
        """The first row of the values measured last, and which site each row belongs to."""

    def note(self, row: int) -> Sequence[Event]:
        """Tell which site each row belongs to, where the first is this one."""
        self.uses += 1
        noted, events = self._noted
        if row != noted:
            pairs = zip(self._sites, self.again.offsets, strict=True)
            events = [(site, row + offset, self._log) for site, offset in pairs]
            self._noted = row, events
        return events
