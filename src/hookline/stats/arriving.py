"""What was measured on a CUDA device, on its way to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline.stats.logs import BINS, SKETCH_WIDTH, Measured
from hookline.stats.preparing import undisturbed
from hookline.stats.rows import COLUMNS, FINITE, M2, MAX, MEAN, MIN, NAN, NEGINF, POSINF, merge_rows
from hookline.stats.waiting import wait_for

_WIDTH = len(COLUMNS)

PARTIAL_WIDTH = _WIDTH + 2
"""Numbers in a row on the device: those of a row, and of an update what was given and lost."""


_NO_EXTRAS: dict[str, npt.NDArray[Any]] = {
    "sketched": np.empty(0, np.int64),
    "sketches": np.empty((0, SKETCH_WIDTH), np.float32),
    "counted": np.empty(0, np.int64),
    "counts": np.empty((0, 3)),
    "histograms": np.empty((0, BINS), np.int64),
}


class CudaStep:
    """What was measured since the last take, besides the rows in the slots."""

    def __init__(self) -> None:
        self.sketched: list[int] = []
        self.sketches: list[Tensor] = []
        self.counted: list[int] = []
        self.counts: list[Tensor] = []
        self.updated: list[int] = []
        self.compressed: dict[int, tuple[int, int]] = {}
        """Rows of tensors that repeat their elements, or leave zeros out: how often, how many."""


class CudaTaken:
    """Numbers of a step on their way to the host."""

    def __init__(
        self, host: Tensor, event: torch.cuda.Event, sizes: tuple[int, ...], step: CudaStep
    ) -> None:
        self._host = host
        self._event = event
        self._sizes = sizes
        self._step = step

    def wait(self) -> Measured:
        """Wait for the copy."""
        wait_for(self._event)
        with undisturbed():  # no mode is to see that
            flat = self._host.numpy()
        step, size = self._step, self._sizes[0]
        numbers = flat[:size].reshape(-1, PARTIAL_WIDTH)
        updated = np.array(step.updated, dtype=np.int64)
        measured = Measured(
            rows=numbers[:, :_WIDTH].copy(),
            updated=updated,
            updates=numbers[updated, _WIDTH:],
            **_NO_EXTRAS if len(flat) == size else self._read_extras(flat),
        )
        for row, (repeats, zeros) in step.compressed.items():
            _expand(measured, row, repeats, zeros)
        return measured

    def _read_extras(self, flat: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[Any]]:
        """Read the sketches and counts, which most steps have none of."""
        _, sketches, counts = np.split(flat, np.cumsum(self._sizes)[:2])
        counts = counts.reshape(-1, 3 + BINS)
        with np.errstate(over="ignore"):
            narrow = sketches.reshape(-1, SKETCH_WIDTH).astype(np.float32)
        return {
            "sketched": np.array(self._step.sketched, dtype=np.int64),
            "sketches": narrow,
            "counted": np.array(self._step.counted, dtype=np.int64),
            "counts": counts[:, :3].copy(),
            "histograms": counts[:, 3:].astype(np.int64),
        }


def _expand(measured: Measured, row: int, repeats: int, zeros: int) -> None:
    """Count the elements that a compressed tensor does not hold."""
    one = measured.rows[row]
    one[[FINITE, NAN, POSINF, NEGINF, M2]] *= repeats
    places = np.flatnonzero(measured.counted == row)
    measured.counts[places] *= repeats
    measured.histograms[places] *= repeats
    if zeros:
        none = np.zeros(_WIDTH)
        none[FINITE] = zeros
        assert none[MIN] == none[MAX] == none[MEAN] == 0
        measured.rows[row] = merge_rows(np.stack([one, none]), [0, 0], 1)[0]
        measured.counts[places, 0] += zeros
        measured.histograms[places, 0] += zeros
