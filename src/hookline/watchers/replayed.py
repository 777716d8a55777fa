"""What CUDA graphs measure while they are replayed, without Python.

When a graph runs for the first time it is not recorded yet: its values are heard of as usual, and
each gets a slot that does not move. What is recorded then measures into the slot, and a step takes
what has come together there.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from hookline.hooks.operators import MOST_PLACES

_TOGETHER = 1024
"""Slots that are made, and taken, together."""


def has_cuda_graphs() -> bool:
    """Tell whether the compiler has ever made a CUDA graph in this process."""
    return "torch._inductor.cudagraph_trees" in sys.modules


class Replayed:
    """The slots of one watch, and the sites whose values come there."""

    def __init__(self) -> None:
        self._slots: dict[Any, list[tuple[Any, int]]] = {}
        """By device: slots, and how many of them are taken."""
        self._keys: dict[int, tuple[Any, int]] = {}
        """By the address of a key: the slots it points into, and the first that is its own."""
        self._sites: dict[Any, dict[int, int]] = {}
        """By slots: the site of each."""

    def __bool__(self) -> bool:
        return bool(self._sites)

    def meet(self, key: Tensor, number: int, site: int, value: Tensor) -> None:
        """Have a value measured at replays that was heard of now."""
        known = self._keys.get(key.data_ptr())
        if known is None:
            known = self._keys[key.data_ptr()] = self._reserve(value)
            slots, first = known
            key.fill_(slots.slot(first))
        slots, first = known
        if first + number not in self._sites[slots]:
            from hookline.stats.keyed import keyed_for

            keyed_for(value.device).warm(value.dtype)
            self._sites[slots][first + number] = site

    def _reserve(self, value: Tensor) -> tuple[Any, int]:
        from hookline.stats.static import StaticSlots

        made = self._slots.setdefault(value.device, [])
        if not made or made[-1][1] + MOST_PLACES > _TOGETHER:
            slots = StaticSlots(value.device, _TOGETHER)
            self._sites[slots] = {}
            made.append((slots, 0))
        slots, used = made[-1]
        made[-1] = slots, used + MOST_PLACES
        return slots, used

    def take(self) -> tuple[dict[Any, Any], list[tuple[int, int, Any]]]:
        """Hand over what replays measured since the last time, and which site each row is of."""
        taken = {slots: slots.take() for slots in self._sites}
        events = [
            (site, slot, slots)
            for slots, sites in self._sites.items()
            for slot, site in sites.items()
        ]
        return taken, events
