"""Tensors of a CUDA device that come together again and again, measured with hardly any Python.

What a compiled graph shows, or a training step makes, has the same dtypes and sizes each time. Its
memory is mostly the same too, and so is the place of its rows: then the launch is known already.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from hookline._torch import current_cuda_device, has_function_mode, raw_cuda_stream
from hookline.stats.likeness import Likeness
from hookline.stats.logs import NOT_NOW, UNLIKE
from hookline.stats.slots import SLOT_BYTES, SLOTS, Slots

Launch = tuple[Any, tuple[Any, ...], tuple[Any, ...]]
"""What launches a kernel, and its arguments before and after those that are known only now."""

_place_of = Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of one dtype that one launch reads."""

    tensors: tuple[int, ...]
    """Which of those that come together: those of a memory of their own."""
    find: Callable[[], Launch | None]
    """What finds the kernel, if it is compiled."""
    programs: int
    """How many programs read them."""
    numbers: tuple[int, ...]
    """The kernel's arguments after the addresses."""
    missing: int
    """How many addresses more the kernel takes."""


class Repeat:
    """Measure tensors that are like some that were measured, in a launch for each dtype."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        parts: Sequence[Part],
        *,
        readers: Mapping[int, int],
        index: int,
        slots: Slots,
        lock: threading.Lock,
    ) -> None:
        order = [number for part in parts for number in part.tensors]
        self.offsets = [order.index(readers[number]) for number in range(len(tensors))]
        """Which row each tensor has, counted from the first: the same memory is read once."""
        self._parts = parts
        self._count = len(order)
        self._shared = [(one, other) for one, other in readers.items() if one != other]
        """Tensors that lie where another one lies, and that one."""
        self._likeness = Likeness(tensors)
        self._index, self._slots, self._lock = index, slots, lock
        self._places: list[int] = []
        """Where they lay the last time."""
        self._arranged: tuple[int, int] | None = None
        """The slot and the stream that the launches are for."""
        self._launches: list[tuple[Any, tuple[Any, ...]]] = []

    def __call__(self, tensors: Sequence[Tensor | None]) -> int:
        """Measure them; give the first row, or why not: `UNLIKE` or `NOT_NOW`.

        Not now is on a stream that nothing was measured on since the last merge, where there are
        not slots enough until the next one, and where a kernel cannot read them as they lie.
        """
        if has_function_mode():  # it would see every look at them
            with torch._C.DisableTorchFunction():
                return self(tensors)
        if not self._likeness.holds(tensors):
            return UNLIKE
        alike = cast("Sequence[Tensor]", tensors)
        if current_cuda_device() == self._index:
            return self._measure(alike)
        with torch.cuda.device(self._index):
            return self._measure(alike)

    def is_like(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether these are what it measures, now or another time."""
        if has_function_mode():
            with torch._C.DisableTorchFunction():
                return self.is_like(tensors)
        return self._likeness.holds(tensors) and all(
            _place_of(tensors[one]) == _place_of(tensors[other]) for one, other in self._shared
        )

    def _measure(self, tensors: Sequence[Tensor]) -> int:
        if torch.cuda.is_current_stream_capturing():
            return NOT_NOW
        places = list(map(_place_of, tensors))
        stream = raw_cuda_stream(self._index)
        slots = self._slots
        with self._lock:
            if places != self._places:
                if any(places[one] != places[other] for one, other in self._shared):
                    return UNLIKE
                if not _are_readable(tensors, places):
                    return NOT_NOW
                self._places, self._arranged = places, None
            slot: int = slots.used
            if stream not in slots.streams or slot + self._count > SLOTS:
                return NOT_NOW
            if self._arranged != (slot, stream) and not self._arrange(slot, stream):
                return NOT_NOW
            slots.used = slot + self._count
            for launch, args in self._launches:
                launch(*args)
            return slots.base + slot

    def _arrange(self, slot: int, stream: int) -> bool:
        """Write the launches down for a slot and a stream; false where a kernel is not compiled."""
        launches = []
        for part in self._parts:
            ready = part.find()
            if ready is None:
                return False
            launch, first, last = ready
            at = [self._places[number] for number in part.tensors]
            args = (
                *(part.programs, 1, 1, stream),
                *first,
                *at,
                *at[:1] * part.missing,
                *part.numbers,
                self._slots.rows_at + slot * SLOT_BYTES,
                self._slots.programs_at + 4 * slot,
                *last,
            )
            launches.append((launch, args))
            slot += len(at)
        self._launches, self._arranged = launches, (slot - self._count, stream)
        return True


def _are_readable(tensors: Sequence[Tensor], places: list[int]) -> bool:
    """Tell whether a kernel can read at these addresses what it read at others."""
    # Where memory was freed, the address is that of the offset into nothing.
    return not any(
        at & 15 or at <= 8 * one.storage_offset() for one, at in zip(tensors, places, strict=True)
    )
