"""Whether tensors are like some that were seen: told of several at once, with hardly any Python.

A training that has found its step makes the same tensors again and again, in new memory or, once
the allocator has found its step too, in the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hookline._torch import guard_tensors, is_nested


class Likeness:
    """Tell whether tensors are what others were, in all but where they lie and what they hold.

    They are those that the kernels read, none of them nested.
    """

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
        self._first = list(first.values())
        """Which came first, of each object."""
        self._check = guard_tensors([tensors[number] for number in self._first])

    def holds(self, tensors: Sequence[Tensor | None]) -> bool:
        """Tell whether these are like those, and the same ones the same object."""
        if len(tensors) != self._count:
            return False
        try:
            # The guard asks for sizes before all else, which ends the process for these.
            if any(map(is_nested, tensors)):
                return False
        except TypeError:  # one is no tensor
            return False
        if not self._same:
            return self._check(*tensors)
        for number, other in self._same:
            if tensors[number] is not tensors[other]:
                return False
        return self._check(*[tensors[number] for number in self._first])
