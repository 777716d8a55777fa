"""What a log of statistics does, whichever device it measures on.

A log measures tensors one after the other and hands over what it has: a row for each, and for
those where it was asked a sketch and counts. `add` is called hundreds of times a training step and
never waits for a device; what it measured is there only after `take`, when somebody waits for it.
Whoever cannot wait for that asks `find_bad`.
"""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

# Torch is imported by what measures: whoever only reads rows does not need it.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

SKETCH_WIDTH = 64
"""How many numbers a sketch has."""

BINS = 256
"""How many bins the histogram of exponents has."""

TOGETHER = 16
"""How many tensors of a GPU are measured in one launch."""


class Extras(enum.IntFlag):
    """What to measure of a tensor besides its row."""

    SKETCH = 1
    """64 sums with fixed signs: position-sensitive, linear, and as long as the tensor."""
    COUNTS = 2
    """How many zeros, elements below tiny and near the maximum; the histogram of exponents."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What a log measured between two takes, on the host."""

    rows: npt.NDArray[np.float64]
    """One row for each tensor in the order of `add`, shape (n, 8); see `rows.COLUMNS`."""
    sketched: npt.NDArray[np.int64]
    """The numbers of the rows that have a sketch."""
    sketches: npt.NDArray[np.float32]
    """Their sketches, shape (k, 64)."""
    counted: npt.NDArray[np.int64]
    """The numbers of the rows that have counts."""
    counts: npt.NDArray[np.float64]
    """Zeros, elements below tiny, elements near the maximum, shape (k, 3)."""
    histograms: npt.NDArray[np.int64]
    """Elements by exponent, shape (k, 256); the last bin is for NaN and infinity."""
    updated: npt.NDArray[np.int64]
    """The numbers of the rows that are of an update."""
    updates: npt.NDArray[np.float64]
    """Elements that had a gradient, and those of them that did not change, shape (k, 2)."""


Update: TypeAlias = "tuple[Tensor, Tensor, Tensor | None]"
"""A parameter before and after a step, and its gradient."""


class Taken(Protocol):
    """What was taken from a log and may still be on its way."""

    def wait(self) -> Measured:
        """Wait until all of it is on the host; any thread may."""
        ...


UNLIKE, NOT_NOW = -1, -2
"""Why tensors are not measured: they are not what they were, or it cannot be done now."""


class Repeat(Protocol):
    """Measure tensors that are like some that were measured."""

    offsets: list[int]
    """Which row each tensor has, counted from the first."""

    def __call__(self, tensors: Sequence[Tensor | None]) -> int:
        """Measure them; give the first row, or why not: `UNLIKE` or `NOT_NOW`."""
        ...

    def is_like(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether these are what it measures, now or another time."""
        ...


class Log(Protocol):
    """Measure tensors of one device, one after the other."""

    def add(self, tensor: Tensor, extras: int = 0) -> int:
        """Measure a tensor as it is now; give the number of its row since the last take."""
        ...

    def add_together(self, tensors: Sequence[Tensor]) -> list[int]:
        """Measure some tensors as they are now, for less than one by one where that can be."""
        ...

    def repeat(self, tensors: Sequence[Tensor]) -> Repeat | None:
        """Give what measures tensors like these for less than that, again and again; if any."""
        ...

    def add_update(self, before: Tensor, after: Tensor, grad: Tensor | None = None) -> int:
        """Measure `after - before`, and how many elements with a gradient did not change."""
        ...

    def add_updates(self, updates: Sequence[Update]) -> list[int]:
        """Measure some updates, for less than one by one where that can be."""
        ...

    def find_bad(self) -> dict[int, bool]:
        """Give the rows since the last take that have a NaN or a positive infinity: is it a NaN.

        This waits for the device; a negative infinity alone is what masks are made of.
        """
        ...

    def take(self) -> Taken:
        """Hand over everything since the last take and start again from row 0."""
        ...


def open_log(device: torch.device | str) -> Log:
    """Make the log that measures tensors of this device fastest."""
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        from hookline.stats.cpu import CpuLog

        return CpuLog()
    # Triton comes with torch's own builds for CUDA, but not with every build.
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        cuda: Any = importlib.import_module("hookline.stats.cuda")
        log: Log = cuda.CudaLog(device)
        return log
    from hookline.stats.anywhere import TorchLog

    return TorchLog(device)
