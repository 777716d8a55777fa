"""Where the CPU log writes: pages of numbers that stay where they are until they are taken."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from hookline.stats.logs import BINS, SKETCH_WIDTH, Measured
from hookline.stats.rows import NAN, POSINF

_PAGE_BYTES = 1 << 16


class Pages:
    """Records of one width, in pages that never move: the kernel writes there without the GIL."""

    __slots__ = ("_address", "_dtype", "_left", "_length", "_pages", "_stride", "_width", "count")

    def __init__(self, width: int, dtype: type[np.generic] = np.float64) -> None:
        self._width = width
        self._dtype = dtype
        self._stride = width * np.dtype(dtype).itemsize
        self._length = _PAGE_BYTES // self._stride
        self._pages: list[npt.NDArray[Any]] = []
        self._address = 0
        self._left = 0
        self.count = 0

    def reserve(self) -> int:
        """Give the address where the next record goes."""
        if not self._left:
            page = np.zeros((self._length, self._width), dtype=self._dtype)
            self._pages.append(page)
            self._address = page.ctypes.data
            self._left = self._length
        address = self._address
        self._address = address + self._stride
        self._left -= 1
        self.count += 1
        return address

    def append(self, record: npt.NDArray[Any]) -> None:
        """Add a record that is there already."""
        self.reserve()
        self._pages[-1][self._length - self._left - 1] = record

    def gather(self) -> npt.NDArray[Any]:
        """Give all records as one array."""
        if not self._pages:
            return np.empty((0, self._width), dtype=self._dtype)
        return np.concatenate(self._pages)[: self.count]


class Sheet:
    """What was measured since the last take; waiting for it gives it as arrays."""

    __slots__ = (
        "counted",
        "counts",
        "histograms",
        "rows",
        "running",
        "sketched",
        "sketches",
        "updated",
        "updates",
    )

    def __init__(self) -> None:
        self.rows = Pages(8)
        self.sketched: list[int] = []
        self.sketches = Pages(SKETCH_WIDTH, np.float32)
        self.counted: list[int] = []
        self.counts = Pages(3)
        self.histograms = Pages(BINS, np.int64)
        self.updated: list[int] = []
        self.updates = Pages(2)
        self.running: set[int] = set()
        """The rows that are being measured."""

    def reserve_sketch(self, number: int) -> int:
        """Give the address for the sketch of a row."""
        self.sketched.append(number)
        return self.sketches.reserve()

    def reserve_counts(self, number: int) -> tuple[int, int]:
        """Give the addresses for the counts and the histogram of a row."""
        self.counted.append(number)
        return self.counts.reserve(), self.histograms.reserve()

    def reserve_update(self, number: int) -> int:
        """Give the address for the counts of an update."""
        self.updated.append(number)
        return self.updates.reserve()

    def find_bad(self) -> dict[int, bool]:
        """Give the rows that have a NaN or a positive infinity, and whether it is a NaN."""
        self._settle()
        rows = self.rows.gather()
        found: list[int] = np.flatnonzero(rows[:, NAN : POSINF + 1].any(axis=1)).tolist()
        return {one: bool(rows[one, NAN]) for one in found}

    def _settle(self) -> None:
        while self.running:
            time.sleep(1e-5)

    def wait(self) -> Measured:
        """Give what was measured, once no other thread is still measuring."""
        self._settle()
        return Measured(
            rows=self.rows.gather(),
            sketched=np.array(self.sketched, dtype=np.int64),
            sketches=self.sketches.gather(),
            counted=np.array(self.counted, dtype=np.int64),
            counts=self.counts.gather(),
            histograms=self.histograms.gather(),
            updated=np.array(self.updated, dtype=np.int64),
            updates=self.updates.gather(),
        )
