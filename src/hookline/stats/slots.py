"""Where the kernels of a CUDA device leave partial rows until they are merged.

A tensor's programs each write a row into the tensor's slot. Slots are merged when all are used or
when somebody asks. Not safe for several threads: whoever uses it holds a lock.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hookline._torch import raw_cuda_stream
from hookline.stats import kernels
from hookline.stats.arriving import PARTIAL_WIDTH
from hookline.stats.preparing import undisturbed

MOST_PROGRAMS = 256
"""Partial rows of one tensor: one or two programs for each multiprocessor of a large GPU."""

SLOTS = 512
"""Tensors measured before their partial rows are merged: 10 MiB of them."""

SLOT_BYTES = MOST_PROGRAMS * PARTIAL_WIDTH * 8


class Slots:
    """Partial rows of the tensors of one device, and the streams that write them."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._device = torch.device("cuda", index)
        with torch.inference_mode(False):  # they are written to inside and outside of it
            self.partials = torch.empty(
                (SLOTS, MOST_PROGRAMS, PARTIAL_WIDTH), dtype=torch.float64, device=self._device
            )
            self.programs = torch.zeros(SLOTS, dtype=torch.int32, device=self._device)
        self.rows_at = self.partials.data_ptr()
        """The address of the first slot."""
        self.programs_at = self.programs.data_ptr()
        """The address of how many rows the first slot has."""
        self.used = 0
        """How many slots are taken."""
        self.base = 0
        """The number of the row in slot 0, counted from the last take."""
        self.streams: dict[int, torch.cuda.Stream] = {}
        """By its address, every stream that wrote since the last merge, or merged."""
        self._is_free = torch.cuda.Event()
        """When the slots may be written to: after the last merge."""
        self._is_free.record(torch.cuda.current_stream(index))
        self.merged: list[Tensor] = []
        """Rows that are merged already."""

    def use_stream(self) -> int:
        """Give the stream that work goes to now; all that were used are remembered."""
        stream: int = raw_cuda_stream(self._index)
        if stream not in self.streams:
            current = torch.cuda.current_stream(self._index)
            current.wait_event(self._is_free)
            self.streams[stream] = current
        return stream

    def reserve(self, count: int) -> tuple[int, int]:
        """Take slots that follow each other; give the first and the number of its row."""
        if self.used + count > SLOTS:
            with undisturbed():
                self.merge()
        slot = self.used
        self.used += count
        return slot, self.base + slot

    def places(self, slot: int) -> tuple[int, int]:
        """Give the addresses of a slot and of how many rows it has."""
        return self.rows_at + slot * SLOT_BYTES, self.programs_at + 4 * slot

    def tensors(self, slot: int) -> tuple[Tensor, Tensor]:
        """Give the same as tensors."""
        return self.partials[slot:], self.programs[slot:]

    def merge(self) -> list[Tensor]:
        """Merge the partial rows so far, and begin again at the first slot; give all rows."""
        here = torch.cuda.current_stream(self._index)
        for raw, other in self.streams.items():
            if raw != here.cuda_stream:
                here.wait_stream(other)
        rows = torch.empty((self.used, PARTIAL_WIDTH), dtype=torch.float64, device=self._device)
        if self.used:
            kernels.reduce_rows[(self.used,)](
                self.partials, self.programs, rows, MOST=MOST_PROGRAMS, num_warps=4
            )
            self.programs.zero_()
        self._is_free.record(here)
        self.streams = {here.cuda_stream: here}
        self.merged.append(rows)
        self.base += self.used
        self.used = 0
        return self.merged

    def take(self) -> list[Tensor]:
        """Merge, hand over all rows and start again from row 0."""
        merged = self.merge()
        self.merged = []
        self.base = 0
        return merged
