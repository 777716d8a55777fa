"""How a tensor on a CUDA device is found in memory, and the kernel launched that measures it.

Nothing is copied where the kernels can read it as it lies: dense in any order, or in runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline._torch import is_functorch_active
from hookline.stats import kernels
from hookline.stats.launching import Launcher
from hookline.stats.preparing import (
    PLAIN,
    Prepared,
    find_layout,
    limits_of,
    prepare,
)
from hookline.stats.readings import (
    READABLE,
    STRIDED_BLOCK,
    STRIDED_UNROLL,
    Reading,
    reading_of,
    tile_columns,
    unit_of,
)
from hookline.stats.slots import MOST_PROGRAMS

LARGE = 1 << 31
"""Elements from which Triton counts in 64 bits."""

Ready = tuple[Any, tuple[Any, ...], tuple[Any, ...], int, int]
"""What launches a kernel, its first and last arguments, numbers in a tile, the most programs."""


class Measuring:
    """Launch the measuring kernels of one device, each compiled when it is first needed."""

    def __init__(self, index: int) -> None:
        self._capability = torch.cuda.get_device_capability(index)
        self._processors = torch.cuda.get_device_properties(index).multi_processor_count
        self._flat: dict[tuple[torch.dtype, bool], Launcher] = {}
        self._strided: dict[tuple[torch.dtype, int, int], Launcher] = {}
        self.ready: dict[torch.dtype, Ready] = {}
        """By dtype what measures a plain tensor at an aligned address."""

    def reading(self, kind: torch.dtype) -> Reading:
        """Give how a dtype is read here."""
        return reading_of(kind, self._capability)

    def see(self, values: Tensor) -> Tensor:
        """Give the tensor that Triton is shown."""
        return self.reading(values.dtype).see(values)

    def most_programs(self, reading: Reading) -> int:
        """Give how many programs keep every multiprocessor busy, and no one more than others."""
        return min(self._processors * reading.programs, MOST_PROGRAMS)

    def locate(self, tensor: Tensor, *, with_runs: bool = True) -> Prepared:
        """Give the numbers of a tensor as they lie, copied only where there is no other way."""
        is_plain = tensor.dtype in READABLE and is_direct(tensor, in_order=False)
        if is_plain and not tensor.is_nested:
            layout = find_layout(tensor.shape, tensor.stride(), False)
            if not layout.repeated and (layout.is_dense or (with_runs and layout.run)):
                run = None if layout.is_dense else layout.run
                return Prepared(tensor, limits_of(tensor.dtype), run=run)
        return prepare(tensor, shortest_run=1 if with_runs else 0)

    def launch(
        self,
        found: Prepared,
        stream: int,
        places: tuple[int, int],
        make_tensors: Callable[[], Sequence[Tensor]],
    ) -> None:
        """Measure numbers into the rows at `places`."""
        values = found.values
        size, at, kind = values.numel(), values.data_ptr(), values.dtype
        if not size:
            return
        if found.run is not None:
            self._launch_strided(found, stream, places, make_tensors)
            return
        reading = self.reading(kind)
        is_aligned = at % 16 == 0
        launcher = self._flat.get((kind, is_aligned))
        if launcher is None:
            constants = reading.constants(is_aligned=is_aligned)
            launcher = Launcher(kernels.measure, warps=reading.warps, **constants)
            self._flat[kind, is_aligned] = launcher
        most = self.most_programs(reading)
        key = (is_aligned, size >= LARGE)
        launcher(
            key,
            min(-(-size // reading.block), most),
            stream,
            (at, size, *places),
            lambda: (reading.see(values), size, *make_tensors()),
        )
        if key == (True, False) and Launcher.is_quick and kind not in self.ready:
            self.ready[kind] = (*launcher.ready[key], reading.block, most)

    def _launch_strided(
        self,
        found: Prepared,
        stream: int,
        places: tuple[int, int],
        make_tensors: Callable[[], Sequence[Tensor]],
    ) -> None:
        assert found.run is not None
        values = found.values
        at, kind = values.data_ptr(), values.dtype
        inner, step = found.run
        outer = values.numel() // inner
        columns, unit = tile_columns(inner), unit_of(inner, step)
        reading = self.reading(kind)
        launcher = self._strided.get((kind, columns, unit))
        if launcher is None:
            launcher = Launcher(
                kernels.measure_strided,
                UNIT=unit,
                COLUMNS=columns,
                BLOCK=STRIDED_BLOCK,
                UNROLL=STRIDED_UNROLL,
                CODE=reading.code,
                SUMS=reading.sums,
            )
            self._strided[kind, columns, unit] = launcher
        numbers = (inner // unit, outer, step // unit)
        tiles = -(-inner // columns) * -(-outer // (STRIDED_BLOCK // columns))
        launcher(
            (at % 16 == 0, *(one >= LARGE for one in numbers)),
            min(tiles, self.most_programs(reading)),
            stream,
            (at, *numbers, *places),
            lambda: (reading.see(values), *numbers, *make_tensors()),
        )


def is_direct(tensor: Tensor, *, in_order: bool = True) -> bool:
    """Tell whether a tensor's own memory has its numbers, in order and side by side."""
    return (
        type(tensor) in PLAIN
        and not is_functorch_active()
        and tensor.layout is torch.strided
        and (not in_order or tensor.is_contiguous())
        and not tensor.is_neg()
        # Where memory was freed, the address is that of the offset into nothing.
        and tensor.data_ptr() > 8 * tensor.storage_offset()
    )
