"""Slots on a CUDA device that do not move: what a CUDA graph measures into while it is replayed.

A graph repeats its kernels without Python, with the addresses of when it was recorded. So each
value has a slot of its own, and measuring merges into what the slot has; whoever takes gets what
was added since the last time, however often the graph was replayed.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline._errors import UnsupportedTensor
from hookline._torch import has_function_mode, raw_cuda_stream
from hookline.stats import static_kernels
from hookline.stats.arriving import PARTIAL_WIDTH, CudaStep, CudaTaken
from hookline.stats.launching import Launcher
from hookline.stats.logs import Measured
from hookline.stats.measuring import LARGE, Measuring
from hookline.stats.preparing import Prepared, undisturbed
from hookline.stats.readings import STRIDED_BLOCK, STRIDED_UNROLL, tile_columns, unit_of
from hookline.stats.slots import MOST_PROGRAMS, SLOT_BYTES

_VISITS = 8
"""The column that counts how often a slot was measured into."""


class StaticTaken:
    """What was taken from slots and may still be on its way."""

    def __init__(self, arriving: CudaTaken, host: Tensor) -> None:
        self._arriving = arriving
        self._host = host

    def wait(self) -> Measured:
        """Wait until all of it is on the host; row `i` is slot `i`, empty where nothing was."""
        return self._arriving.wait()

    def wait_visits(self) -> npt.NDArray[np.int64]:
        """Wait, and give for each slot how often it was measured into."""
        self._arriving.wait()
        with undisturbed():
            numbers: Any = self._host.numpy()
        visits: npt.NDArray[np.int64] = numbers.reshape(-1, PARTIAL_WIDTH)[:, _VISITS].astype(
            np.int64
        )
        return visits


class StaticSlots:
    """Measure tensors of one CUDA device into slots whose addresses never change.

    Two streams must not measure into one slot at once. Everything that writes slots is to be done,
    or on its way on the stream that is current, when they are taken.
    """

    def __init__(self, device: torch.device | str, count: int) -> None:
        device = torch.device(device)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", self._index)
        self._count = count
        with torch.cuda.device(self._index), torch.inference_mode(False), undisturbed():
            shape = (count, MOST_PROGRAMS, PARTIAL_WIDTH)
            self._partials = torch.zeros(shape, dtype=torch.float64, device=self._device)
            self._partials[:, :, 4] = torch.inf
            self._partials[:, :, 5] = -torch.inf
        self._rows_at = self._partials.data_ptr()
        self._measuring = Measuring(self._index)
        self._flat: dict[torch.dtype, Launcher] = {}
        self._strided: dict[tuple[torch.dtype, int, int], Launcher] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Give how many slots there are."""
        return self._count

    def slot(self, number: int) -> int:
        """Give the address of a slot."""
        if not 0 <= number < self._count:
            raise IndexError(f"There are {self._count} slots, and none has number {number}.")
        return self._rows_at + number * SLOT_BYTES

    def accumulate(self, tensor: Tensor, slot: int) -> None:
        """Merge a tensor's statistics into the slot at this address, on the current stream.

        This may be recorded: it waits for nothing, and takes memory only for a tensor that no
        kernel can read as it lies. Triton compiles a kernel when it is first needed, which cannot
        be recorded, so measure once before or call `warm`.
        """
        if has_function_mode():
            with torch._C.DisableTorchFunction():
                self.accumulate(tensor, slot)
            return
        found = self._measuring.locate(tensor)
        if found.zeros:
            raise UnsupportedTensor(
                "A sparse tensor is not measured into a fixed slot: how much it holds is known "
                "only on the host. Measure `tensor.to_dense()`."
            )
        self._launch(found, slot, raw_cuda_stream(self._index))

    def warm(self, dtype: torch.dtype) -> None:
        """Compile what measures plain tensors of a dtype, and measure nothing."""
        with torch.cuda.device(self._index), undisturbed():
            spare = StaticSlots(self._device, 1)
            spare._flat = self._flat
            bytes_ = torch.zeros(64, dtype=torch.uint8, device=self._device)
            for first in (0, dtype.itemsize):  # an address that is aligned, and one that is not
                spare.accumulate(
                    bytes_[first : first + 2 * dtype.itemsize].view(dtype), spare.slot(0)
                )

    def _launch(self, found: Prepared, slot: int, stream: int) -> None:
        values = found.values
        at, size, kind = values.data_ptr(), values.numel(), values.dtype
        reading = self._measuring.reading(kind)
        most = self._measuring.most_programs(reading)
        number = (slot - self._rows_at) // SLOT_BYTES
        if found.run is None:
            launcher = self._flat.get(kind)
            if launcher is None:
                launcher = self._flat[kind] = Launcher(
                    static_kernels.accumulate, warps=reading.warps, **reading.constants()
                )
            numbers: tuple[int, ...] = (size, found.repeats)
            # Also where there is no element: the visit counts.
            programs = max(min(-(-size // reading.block), most), 1)
        else:
            inner, step = found.run
            outer = size // inner
            columns, unit = tile_columns(inner), unit_of(inner, step)
            launcher = self._strided.get((kind, columns, unit))
            if launcher is None:
                launcher = self._strided[kind, columns, unit] = Launcher(
                    static_kernels.accumulate_strided,
                    UNIT=unit,
                    COLUMNS=columns,
                    BLOCK=STRIDED_BLOCK,
                    UNROLL=STRIDED_UNROLL,
                    CODE=reading.code,
                    SUMS=reading.sums,
                )
            numbers = (inner // unit, outer, step // unit, found.repeats)
            tiles = -(-inner // columns) * -(-outer // (STRIDED_BLOCK // columns))
            programs = min(tiles, most)
        launcher(
            (at % 16 == 0, *(one >= LARGE for one in numbers)),
            programs,
            stream,
            (at, *numbers, slot),
            lambda: (reading.see(values), *numbers, self._partials[number]),
        )

    def take(self) -> StaticTaken:
        """Hand over what was measured since the last take; all slots are empty then."""
        with self._lock, torch.cuda.device(self._index), undisturbed():
            rows = torch.empty(
                (self._count, PARTIAL_WIDTH), dtype=torch.float64, device=self._device
            )
            if self._count:
                static_kernels.empty_slots[(self._count,)](
                    self._partials, rows, MOST=MOST_PROGRAMS, num_warps=4
                )
            host = torch.empty(rows.numel(), dtype=torch.float64, pin_memory=True)
            host.copy_(rows.flatten(), non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._index))
        return StaticTaken(CudaTaken(host, event, (host.numel(), 0, 0), CudaStep()), host)
