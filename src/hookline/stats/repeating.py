"""Tensors of a CUDA device that come together again and again, measured with hardly any Python.

What a compiled graph shows has the same dtypes and sizes at each run, in new memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hookline._torch import (
    current_cuda_device,
    has_function_mode,
    is_functorch_active,
    raw_cuda_stream,
)
from hookline.stats.launching import Launcher
from hookline.stats.preparing import PLAIN
from hookline.stats.slots import SLOT_BYTES, SLOTS, Slots


class Repeat:
    """Measure tensors that are like some that were measured, in one launch."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        index: int,
        slots: Slots,
        lock: threading.Lock,
        launcher: Launcher,
        ends: Sequence[int],
        offsets: Sequence[int],
    ) -> None:
        self.offsets = list(offsets)
        """Which row each tensor has, counted from the first: the same memory is read once."""
        self._kind = tensors[0].dtype
        self._sizes = [one.numel() for one in tensors]
        self._count = max(offsets) + 1
        self._missing = len(ends) - self._count
        read = [self._sizes[self.offsets.index(number)] for number in range(self._count)]
        self._numbers = (*read, *[0] * self._missing, *ends)
        self._programs = ends[-1]
        self._index, self._slots, self._lock = index, slots, lock
        self._launcher = launcher

    def __call__(self, tensors: Sequence[Tensor]) -> int:
        """Measure them; give the first row, or -1 where they are not what they were."""
        ready = self._launcher.ready.get(self._kind)
        if ready is None or not Launcher.is_quick or has_function_mode() or is_functorch_active():
            return -1
        kind, last, bits = self._kind, 0, 0
        places: list[int] = []
        offsets: list[int] = []
        for one, size in zip(tensors, self._sizes, strict=True):
            if (
                type(one) not in PLAIN
                or one.dtype is not kind
                or one.numel() != size
                or not one.is_contiguous()
                or one.is_neg()
                or one.get_device() != self._index
            ):
                return -1
            at = one.data_ptr()
            if at != last or not places:
                places.append(at)
                bits |= at
                last = at
            offsets.append(len(places) - 1)
        if offsets != self.offsets or bits & 15 or 0 in places:
            return -1
        if torch.cuda.is_current_stream_capturing():
            return -1
        stream = raw_cuda_stream(self._index)
        slots = self._slots
        with self._lock:
            slot = slots.used
            if (
                stream not in slots.streams
                or slot + self._count > SLOTS
                or current_cuda_device() != self._index
            ):
                return -1
            slots.used = slot + self._count
            row = slots.base + slot
            launch, first, constants = ready
            launch(
                self._programs,
                1,
                1,
                stream,
                *first,
                *places,
                *places[:1] * self._missing,
                *self._numbers,
                slots.rows_at + slot * SLOT_BYTES,
                slots.programs_at + 4 * slot,
                *constants,
            )
        return row
