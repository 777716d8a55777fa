"""Which samples are wanted: a set of ids that stays small for a hundred million of them.

Ids are kept as sorted half-open ranges in NumPy arrays; the share of a rank stays a rule and is
never expanded. Knows nothing of where samples come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

# Spelled out, since importing hookline does not load numpy.typing.
Ids = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Flags = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]

_NO_END = 2**63 - 1
_WINDOW = 2**16
"""How many ids are made at a time."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of all ids, dealt out in turn by blocks."""

    rank: int
    """The rank whose part it is."""
    world: int
    """How many ranks there are."""
    block: int
    """How many ids in a row go to one rank."""

    def mask(self, ids: Ids) -> Flags:
        """Tell which of the ids belong to the rank."""
        return np.equal((ids // self.block) % self.world, self.rank)

    def count_below(self, ends: Ids) -> Ids:
        """Count the ids of the rank below each end."""
        whole, rest = np.divmod(ends, self.block * self.world)
        part = np.clip(rest - self.rank * self.block, 0, self.block)
        return np.asarray(whole * self.block + part, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """An immutable set of sample ids."""

    starts: Ids
    """The first id of each range, ascending."""
    ends: Ids
    """The id after the last of each range."""
    shares: tuple[Share, ...] = ()
    """Rules that an id must satisfy besides."""
    excluded: tuple[Wanted, ...] = ()
    """Sets that an id must not be in: those with rules of their own, which are no ranges."""

    @classmethod
    def everything(cls) -> Wanted:
        """Want every sample, however many there are."""
        return cls.of_ranges([(0, None)])

    @classmethod
    def of_ranges(cls, ranges: Iterable[tuple[int, int | None]], end: int | None = None) -> Wanted:
        """Want the ids from `a` up to `b` of each `(a, b)`, None for no end, none from `end` on."""
        limit = _NO_END if end is None else end
        pairs = [(first, _NO_END if last is None else last) for first, last in ranges]
        for first, last in pairs:
            if not 0 <= first <= last:
                raise ValueError(
                    f"({first}, {last}) is no range of ids: 0 <= first <= end must hold"
                )
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return cls(*_merge(table[:, 0], np.minimum(table[:, 1], limit)))

    @classmethod
    def of_ids(cls, ids: Ids) -> Wanted:
        """Want these ids, in any order, each once or more often."""
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        if ids.size > 1 and not bool((ids[1:] > ids[:-1]).all()):
            ids = _sort(ids)
        if ids.size and ids[0] < 0:
            raise ValueError(f"{int(ids[0])} is no id: the first is 0")
        is_first = np.ones(ids.size, dtype=np.bool_)
        is_first[1:] = ids[1:] != ids[:-1] + 1
        is_last = np.ones(ids.size, dtype=np.bool_)
        is_last[:-1] = is_first[1:]
        return cls(ids[is_first], ids[is_last] + 1)

    @property
    def end(self) -> int:
        """Give an id from which on none is wanted; a very large one where there is no end."""
        return int(self.ends[-1]) if self.ends.size else 0

    def without(self, ids: Ids | Wanted) -> Wanted:
        """Want the same but for these."""
        other = ids if isinstance(ids, Wanted) else Wanted.of_ids(ids)
        if other.shares or other.excluded:
            return Wanted(self.starts, self.ends, self.shares, (*self.excluded, other))
        kept = _subtract(self.starts, self.ends, other.starts, other.ends)
        return Wanted(*kept, self.shares, self.excluded)

    def share(self, rank: int, world: int, *, block: int = 1024) -> Wanted:
        """Want only the part of one rank: the ids where `(id // block) % world == rank`."""
        if block < 1 or not 0 <= rank < world:
            raise ValueError(
                f"rank {rank} of {world} in blocks of {block}: ranks go from 0 to world - 1, and a "
                "block holds at least one id"
            )
        rules = (Share(rank, world, block),) if world > 1 else ()
        return Wanted(self.starts, self.ends, (*self.shares, *rules), self.excluded)

    def __contains__(self, sample: object) -> bool:
        """Tell whether an id is wanted."""
        if not isinstance(sample, (int, np.integer)):
            return False
        return bool(self.within(int(sample), int(sample) + 1).size)

    def within(self, start: int, end: int) -> Ids:
        """Give the wanted ids from `start` up to `end`, ascending."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left"))
        begins = np.maximum(self.starts[first:last], start)
        lengths = np.minimum(self.ends[first:last], end) - begins
        before = np.cumsum(lengths) - lengths
        ids = np.repeat(begins - before, lengths) + np.arange(lengths.sum(), dtype=np.int64)
        for rule in self.shares:
            ids = ids[rule.mask(ids)]
        for other in self.excluded:
            ids = np.setdiff1d(ids, other.within(start, end), assume_unique=True)
        return ids

    def ids(self, size: int | None) -> Iterator[int]:
        """Yield the wanted ids below `size`, ascending; without end where neither has one."""
        for window in self._windows(size):
            yield from window.tolist()

    def count(self, size: int | None) -> int | None:
        """Count the wanted ids below `size`; None where there is no end to them."""
        if size is None and self.end == _NO_END:
            return None
        if len(self.shares) > 1 or self.excluded:
            return sum(window.size for window in self._windows(size))
        limit = _NO_END if size is None else size
        starts, ends = np.minimum(self.starts, limit), np.minimum(self.ends, limit)
        for rule in self.shares:
            starts, ends = rule.count_below(starts), rule.count_below(ends)
        return int((ends - starts).sum())

    def _windows(self, size: int | None) -> Iterator[Ids]:
        """Yield the wanted ids in pieces, each from a stretch that begins inside a range."""
        end = self.end if size is None else min(self.end, size)
        low = 0
        while True:
            at = int(np.searchsorted(self.ends, low, side="right"))
            if at == self.ends.size:
                return
            low = max(low, int(self.starts[at]))
            if low >= end:
                return
            high = min(low + _WINDOW, end)
            yield self.within(low, high)
            low = high


def _merge(starts: Ids, ends: Ids) -> tuple[Ids, Ids]:
    """Sort ranges and join those that touch; empty ones go."""
    is_filled = starts < ends
    starts, ends = starts[is_filled], ends[is_filled]
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    is_first = np.ones(starts.size, dtype=np.bool_)
    is_first[1:] = starts[1:] > ends[:-1]
    is_last = np.ones(starts.size, dtype=np.bool_)
    is_last[:-1] = is_first[1:]
    return starts[is_first], ends[is_last]


def _subtract(starts: Ids, ends: Ids, other_starts: Ids, other_ends: Ids) -> tuple[Ids, Ids]:
    """Take ranges away from ranges.

    What is left begins where a range begins or one that is taken away ends, and only where the id
    there is in the first set and not in the second; it ends likewise.
    """
    begins = _sort(np.concatenate([starts, other_ends]))
    begins = begins[_covers(starts, ends, begins) & ~_covers(other_starts, other_ends, begins)]
    lasts = _sort(np.concatenate([ends, other_starts])) - 1
    lasts = lasts[_covers(starts, ends, lasts) & ~_covers(other_starts, other_ends, lasts)]
    return begins, lasts + 1


def _sort(ids: Ids) -> Ids:
    """Sort ids and keep one of each; two sorted halves are merged, which np.unique does not do."""
    ids = np.sort(ids, kind="stable")
    is_new = np.ones(ids.size, dtype=np.bool_)
    is_new[1:] = ids[1:] != ids[:-1]
    return ids[is_new]


def _covers(starts: Ids, ends: Ids, ids: Ids) -> Flags:
    """Tell which ids lie in one of the ranges."""
    if not starts.size:
        return np.zeros(ids.size, dtype=np.bool_)
    at = np.searchsorted(starts, ids, side="right") - 1
    return np.asarray((at >= 0) & (ids < ends[np.maximum(at, 0)]), dtype=np.bool_)
