"""Whether tensors are like some that were seen: told of several at once, with hardly any Python.

A training that has found its step makes the same tensors again and again, in new memory or, once
the allocator has found its step too, in the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from hookline._torch import guard_tensors


class Likeness:
    """Tell whether tensors are what others were, in all but where they lie and what they hold."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        first: dict[int, int] = {}
        for number, one in enumerate(tensors):
            first.setdefault(id(one), number)
        self._count = len(tensors)
        self._same = [
            (number, first[id(one)])
            for number, one in enumerate(tensors)
            if first[id(one)] != number
        ]
        """Which are the very object that came before."""
        self._check = guard_tensors([tensors[number] for number in first.values()])
        self._pick: Callable[[Sequence[Tensor]], Any] | None = None
        """What gives the others, where some came twice."""
        if len(first) == 1:
            self._pick = itemgetter(slice(0, 1))
        elif self._same:
            self._pick = itemgetter(*first.values())

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether these are like those, and the same ones the same object."""
        if len(tensors) != self._count:
            return False
        if self._pick is None:
            return self._check(*tensors)
        for number, other in self._same:
            if tensors[number] is not tensors[other]:
                return False
        return self._check(*self._pick(tensors))
