"""How many samples go through a model at once: as many as make it faster, and as fit."""

from __future__ import annotations

_FIRST = 8
_MOST = 1024
_HEAVY = 64 << 20
"""A batch of so many bytes does not grow: several wait for the model, and for the disk."""

_WORTH = 1.05
"""A batch of twice the size has to be so much faster, sample for sample."""


class BatchSize:
    """The size of the next batch: given, or found by itself; halved where memory runs out."""

    def __init__(self, given: int | None) -> None:
        if given is not None and given < 1:
            raise ValueError(f"a batch of {given} samples is none; give 1 or more")
        self.now = given or _FIRST
        """How many samples are taken together next."""
        self.grows = given is None
        """Whether larger ones are tried still."""
        self._best = 0.0
        self._seen = 0

    def learn(self, count: int, seconds: float, weight: int = 0) -> None:
        """Take into account how long a batch took, and how many bytes it has."""
        if not self.grows or count < self.now or seconds <= 0:
            return
        if weight * 2 > _HEAVY:
            self.grows = False
            return
        self._seen += 1
        if self._seen == 1 and not self._best:
            return  # the first batch of all warms up
        rate = count / seconds
        if self._seen < 3 and self._best and rate < self._best * _WORTH:
            return  # one slow batch says little
        if rate < self._best * _WORTH:
            self.grows = False
            self.now = max(1, self.now // 2) if rate < self._best else self.now
            return
        self._best, self._seen = rate, 0
        if self.now * 2 > _MOST:
            self.grows = False
        else:
            self.now *= 2

    def shrink(self, count: int) -> None:
        """Take into account that so many samples were too many."""
        self.grows = False
        self.now = max(1, min(self.now, count // 2))
