"""Measuring while a CUDA graph is recorded, into whatever slot a key points to at each replay.

A recorded kernel may be given a copy of the key, of which the host knows nothing; so the address of
the slot is what the key holds, and the kernel reads it. A key that holds 0 has no slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hookline._torch import raw_cuda_stream
from hookline.stats import keyed_kernels
from hookline.stats.launching import Launcher
from hookline.stats.measuring import LARGE, Measuring
from hookline.stats.preparing import undisturbed
from hookline.stats.slots import MOST_PROGRAMS


class Keyed:
    """Measure tensors of one CUDA device by keys."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._measuring = Measuring(index)
        self._launchers: dict[torch.dtype, Launcher] = {}
        self._warm: set[torch.dtype] = set()

    def accumulate(self, tensor: Tensor, key: Tensor, number: int) -> None:
        """Merge a tensor into the slot that is `number` after the key's; may be recorded."""
        found = self._measuring.locate(tensor, with_runs=False)
        if found.zeros:
            return  # sparse: how much it holds is known only on the host
        values = found.values
        at, size, kind = values.data_ptr(), values.numel(), values.dtype
        reading = self._measuring.reading(kind)
        launcher = self._launchers.get(kind)
        if launcher is None:
            launcher = self._launchers[kind] = Launcher(
                keyed_kernels.accumulate_keyed,
                warps=reading.warps,
                MOST=MOST_PROGRAMS,
                **reading.constants(),
            )
        most = self._measuring.most_programs(reading)
        launcher(
            (at % 16 == 0, key.data_ptr() % 16 == 0, size >= LARGE),
            max(min(-(-size // reading.block), most), 1),
            raw_cuda_stream(self._index),
            (at, size, found.repeats, key.data_ptr(), number),
            lambda: (reading.see(values), size, found.repeats, key, number),
        )

    def warm(self, dtype: torch.dtype) -> None:
        """Compile what measures a dtype, which cannot be done while a graph is recorded."""
        if dtype in self._warm:
            return
        self._warm.add(dtype)
        with torch.cuda.device(self._index), undisturbed():
            device = torch.device("cuda", self._index)
            keys = torch.zeros(4, dtype=torch.int64, device=device)  # they hold 0: no slot
            bytes_ = torch.zeros(64, dtype=torch.uint8, device=device)
            for first in (0, dtype.itemsize):  # an address that is aligned, and one that is not
                values = bytes_[first : first + 2 * dtype.itemsize].view(dtype)
                for key in (keys[:1], keys[1:2]):
                    self.accumulate(values, key, 0)


_of_device: dict[int, Keyed] = {}


def keyed_for(device: torch.device) -> Keyed:
    """Give what measures by keys on a device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = _of_device.get(index)
    if found is None:
        found = _of_device[index] = Keyed(index)
    return found
