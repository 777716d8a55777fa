"""What CUDA graphs measure while they are replayed, without Python.

When a graph runs for the first time it is not recorded yet: its values are heard of, and each gets
a slot that does not move. What is recorded then measures into the slot, and a step takes what has
come together there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookline.hooks.operators import MOST_PLACES

_TOGETHER = 1024
"""Slots that are made, and taken, together."""


def _apart(device: torch.device, make: Callable[[], Any]) -> Any:
    """Do something in a thread of its own, where its memory is not that of a CUDA graph.

    What a graph takes while it is made comes from a pool of its own, and must be given back.
    """
    made: list[Any] = []

    def run() -> None:
        with torch.cuda.device(device):
            made.append(make())
            event = torch.cuda.Event()
            event.record()
            made.append(event)

    thread = threading.Thread(target=run, name="hookline-slots")
    thread.start()
    thread.join()
    if len(made) < 2:
        raise RuntimeError("no memory could be made ready for CUDA graphs")
    torch.cuda.current_stream(device).wait_event(made[1])
    return made[0]


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

    def measure(self, key: Tensor, number: int, site: int, value: Tensor) -> None:
        """Measure a value that is heard of now, and have it measured at replays."""
        known = self._keys.get(key.data_ptr())
        if known is None:
            known = self._keys[key.data_ptr()] = self._reserve(value)
            slots, first = known
            key.fill_(slots.slot(first))
        slots, first = known
        if first + number not in self._sites[slots]:
            from hookline.stats.keyed import keyed_for

            _apart(value.device, lambda: keyed_for(value.device).warm(value.dtype))
            self._sites[slots][first + number] = site
        slots.accumulate(value, slots.slot(first + number))

    def _reserve(self, value: Tensor) -> tuple[Any, int]:
        from hookline.stats.static import StaticSlots

        made = self._slots.setdefault(value.device, [])
        if not made or made[-1][1] + MOST_PLACES > _TOGETHER:
            slots = _apart(value.device, lambda: StaticSlots(value.device, _TOGETHER))
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
