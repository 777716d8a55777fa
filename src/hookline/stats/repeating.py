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
from hookline.stats.launching import Launcher
from hookline.stats.likeness import Likeness
from hookline.stats.slots import SLOT_BYTES, SLOTS, Slots

Ready = tuple[Any, tuple[Any, ...], tuple[Any, ...]]
"""What launches a kernel, and its arguments before and after those that are known only now."""

_place_of = Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of one dtype that one launch reads."""

    tensors: tuple[int, ...]
    """Which of those that come together: those of a memory of their own."""
    find: Callable[[], Ready | None]
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
        """Measure them; give the first row, or -1 where they are not what they were.

        Nor are they measured here where another device is current, on a stream that nothing was
        measured on since the last merge, or where there are not slots enough until the next one.
        """
        if has_function_mode():  # it would see every look at them
            with torch._C.DisableTorchFunction():
                return self(tensors)
        if not Launcher.is_quick or not self._likeness.holds(tensors):
            return -1
        return self._measure(cast("Sequence[Tensor]", tensors))

    def _measure(self, tensors: Sequence[Tensor]) -> int:
        if torch.cuda.is_current_stream_capturing():
            return -1
        places = list(map(_place_of, tensors))
        stream = raw_cuda_stream(self._index)
        slots = self._slots
        with self._lock:
            if places != self._places and not self._move(tensors, places):
                return -1
            slot: int = slots.used
            if (
                stream not in slots.streams
                or slot + self._count > SLOTS
                or current_cuda_device() != self._index
            ):
                return -1
            if self._arranged != (slot, stream) and not self._arrange(slot, stream):
                return -1
            slots.used = slot + self._count
            for launch, args in self._launches:
                launch(*args)
            return slots.base + slot

    def _move(self, tensors: Sequence[Tensor], places: list[int]) -> bool:
        """Take other addresses; false where a kernel cannot read there what it did."""
        for one, at in zip(tensors, places, strict=True):
            # Where memory was freed, the address is that of the offset into nothing.
            if at & 15 or at <= 8 * one.storage_offset():
                return False
        if any(places[one] != places[other] for one, other in self._shared):
            return False
        self._places, self._arranged = places, None
        return True

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
