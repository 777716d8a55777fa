"""What a CUDA device measures more rarely: the sketch, the counts and the histogram."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.stats import extra_kernels
from hookline.stats.launching import Launcher
from hookline.stats.logs import BINS, SKETCH_WIDTH
from hookline.stats.preparing import Prepared, undisturbed
from hookline.stats.readings import reading_of

_LARGE = 1 << 31
_SKETCH_PROGRAMS = 128
_SKETCH_ROWS = 64
_COUNT_PROGRAMS = 256
_COUNT_BLOCK = 1024


class ExtraKernels:
    """Launch the kernels of the extras; each is compiled when it is first needed."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._capability = torch.cuda.get_device_capability(index)
        self._sketch: dict[torch.dtype, Launcher] = {}
        self._count: dict[Any, Launcher] = {}

    def sketch(self, ordered: Prepared, count: int, stream: int) -> Tensor:
        """Give the sketch of `count` numbers in order, on the device."""
        with undisturbed():
            values = ordered.values
            if ordered.positions is not None:
                dense = torch.zeros(count, dtype=torch.float64, device=self._device)
                flat = values.reshape(-1).to(torch.float64)
                values = dense.index_put_((ordered.positions,), flat)
            size, kind = values.numel(), values.dtype
            if not size:
                return torch.zeros(SKETCH_WIDTH, dtype=torch.float64, device=self._device)
            reading = reading_of(kind, self._capability)
            launcher = self._sketch.get(kind)
            if launcher is None:
                launcher = self._sketch[kind] = Launcher(
                    extra_kernels.sketch, ROWS=_SKETCH_ROWS, CODE=reading.code, SUMS=reading.sums
                )
            programs = min(-(-size // (_SKETCH_ROWS * SKETCH_WIDTH)), _SKETCH_PROGRAMS)
            out = torch.empty((programs, SKETCH_WIDTH), dtype=torch.float64, device=self._device)
            at = values.data_ptr()
            launcher(
                (at % 16 == 0, size >= _LARGE),
                programs,
                stream,
                (at, size, out.data_ptr()),
                lambda: (reading.see(values), size, out),
            )
            return out.sum(0)

    def count(self, values: Tensor, limits: tuple[float, float], stream: int) -> Tensor:
        """Give the counts and then the histogram of dense numbers, on the device."""
        size, kind = values.numel(), values.dtype
        with undisturbed():
            out = torch.zeros(4 + BINS, dtype=torch.int64, device=self._device)
            if size:
                at = values.data_ptr()
                reading = reading_of(kind, self._capability)
                launcher = self._count.get((kind, limits))
                if launcher is None:
                    # Constants, because Triton takes a number that is none as float32.
                    launcher = self._count[kind, limits] = Launcher(
                        extra_kernels.count,
                        TINY=limits[0],
                        HUGE=limits[1],
                        BLOCK=_COUNT_BLOCK,
                        CODE=reading.code,
                        SUMS=reading.sums,
                    )
                launcher(
                    (at % 16 == 0, size >= _LARGE),
                    min(-(-size // _COUNT_BLOCK), _COUNT_PROGRAMS),
                    stream,
                    (at, size, out.data_ptr(), out.data_ptr() + 32),
                    lambda: (reading.see(values), size, out, out[4:]),
                )
            return torch.cat((out[:3], out[4:])).to(torch.float64)
