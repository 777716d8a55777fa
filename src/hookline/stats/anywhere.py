"""The log for any device, by plain torch operations: slow, memory-hungry, and right.

It serves where there is no kernel of our own, and beside our kernels in tests. Nothing waits for
the device until somebody waits for what was taken.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline._errors import UnsupportedTensor
from hookline.stats import reference
from hookline.stats.logs import BINS, SKETCH_WIDTH, Extras, Measured, Update
from hookline.stats.preparing import Prepared, flatten, prepare, prepare_update, undisturbed, widen
from hookline.stats.rows import NAN, POSINF, merge_rows

# A piece has a float64 copy of itself and more; whole rows of the sketch.
_PIECE = 1 << 22


@dataclass(slots=True)
class _Column:
    """Results of one kind, on their device, and which rows they belong to."""

    width: int
    """How many numbers a result has."""
    numbers: list[int] = field(default_factory=list)
    """For each result the number of its row; the pieces of a tensor share one."""
    values: list[Tensor] = field(default_factory=list)
    """The results."""

    def add(self, number: int, value: Tensor) -> None:
        self.numbers.append(number)
        self.values.append(value)

    def stack(self) -> Tensor:
        """Give all results as one tensor on their device."""
        return torch.stack(self.values) if self.values else torch.empty(0, self.width)


@dataclass(slots=True)
class _Sheet:
    """What was measured since the last take."""

    count: int = 0
    """How many rows there are."""
    rows: _Column = field(default_factory=lambda: _Column(8))
    """Rows, one for each piece of a tensor."""
    sketches: _Column = field(default_factory=lambda: _Column(SKETCH_WIDTH))
    """Sketches, one for each piece."""
    counts: _Column = field(default_factory=lambda: _Column(3))
    """Zeros, tiny and huge elements."""
    histograms: _Column = field(default_factory=lambda: _Column(BINS))
    """Elements by exponent."""
    updates: _Column = field(default_factory=lambda: _Column(2))
    """Elements given a gradient, and lost ones."""


class _OnItsWay:
    """What was taken, as tensors on the device; an event tells when they are computed."""

    def __init__(self, sheet: _Sheet, event: Any) -> None:
        self._sheet = sheet
        self._event = event
        with undisturbed():
            self._stacks = {
                name: getattr(sheet, name).stack()
                for name in ("rows", "sketches", "counts", "histograms", "updates")
            }
        if event is not None:
            event.record()

    def wait(self) -> Measured:
        """Wait until all of it is on the host; any thread may."""
        if self._event is not None:
            self._event.synchronize()
        with undisturbed():
            host = {name: stack.cpu().numpy() for name, stack in self._stacks.items()}
        sheet = self._sheet
        sketched, sums = _sum_up(sheet.sketches, host["sketches"])
        with np.errstate(over="ignore"):
            sketches = sums.astype(np.float32)
        counted, counts = _sum_up(sheet.counts, host["counts"])
        _, histograms = _sum_up(sheet.histograms, host["histograms"])
        updated, updates = _sum_up(sheet.updates, host["updates"])
        return Measured(
            rows=merge_rows(host["rows"], sheet.rows.numbers, sheet.count),
            sketched=sketched,
            sketches=sketches,
            counted=counted,
            counts=counts.astype(np.float64),
            histograms=histograms.astype(np.int64),
            updated=updated,
            updates=updates.astype(np.float64),
        )


def _sum_up(column: _Column, values: Any) -> tuple[Any, Any]:
    """Add up the pieces of each row; give the numbers of the rows and their sums."""
    numbers, places = np.unique(np.array(column.numbers, dtype=np.int64), return_inverse=True)
    sums = np.zeros((len(numbers), column.width), dtype=values.dtype)
    np.add.at(sums, places, values)
    return numbers, sums


class TorchLog:
    """Measure tensors of any device; see `Log`."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        # Apple's devices have no float64: what is measured there is copied to the host first.
        self._is_copied = self._device.type == "mps"
        self._lock = threading.Lock()
        self._sheet = _Sheet()

    def add(self, tensor: Tensor, extras: int = 0) -> int:
        """Measure a tensor as it is now; give the number of its row since the last take."""
        prepared = prepare(tensor, ordered=bool(extras & Extras.SKETCH))
        with undisturbed():
            values = flatten(widen(self._receive(prepared.values)))
            pieces = values.split(_PIECE)
            rows = [reference.measure(piece) for piece in pieces]
            rows = [_repeat(row, prepared.repeats) for row in rows]
            if prepared.zeros:
                rows.append(_zeros_row(prepared.zeros, values.device))
            sketches = self._sketch(prepared, values) if extras & Extras.SKETCH else []
            counted = [
                reference.count(piece, prepared.limits)
                for piece in pieces
                if extras & Extras.COUNTS
            ]
            if counted:
                counted = [(c * prepared.repeats, h * prepared.repeats) for c, h in counted]
                counted[0][0][0] += prepared.zeros
                counted[0][1][0] += prepared.zeros
        with self._lock:
            sheet, number = self._number()
            for row in rows:
                sheet.rows.add(number, row)
            for sketch in sketches:
                sheet.sketches.add(number, sketch)
            for counts, histogram in counted:
                sheet.counts.add(number, counts)
                sheet.histograms.add(number, histogram)
        return number

    def add_update(self, before: Tensor, after: Tensor, grad: Tensor | None = None) -> int:
        """Measure `after - before`, and how many elements with a gradient did not change."""
        given = prepare_update(before, after, grad)
        with undisturbed():
            old, new, slope = (
                None if one is None else flatten(self._receive(one)).split(_PIECE) for one in given
            )
            assert old is not None
            assert new is not None
            slopes = [None] * len(old) if slope is None else slope
            updates = [reference.update(*piece) for piece in zip(old, new, slopes, strict=True)]
        with self._lock:
            sheet, number = self._number()
            for row, counts in updates:
                sheet.rows.add(number, row)
                sheet.updates.add(number, counts)
        return number

    def add_updates(self, updates: Sequence[Update]) -> list[int]:
        """Measure some updates, one after the other."""
        return [self.add_update(*one) for one in updates]

    def add_together(self, tensors: Sequence[Tensor]) -> list[int]:
        """Measure some tensors, one after the other."""
        return [self.add(one) for one in tensors]

    def repeat(self, tensors: Sequence[Tensor]) -> None:
        """There is no shorter way."""

    def find_bad(self) -> dict[int, bool]:
        """Give the rows that have a NaN or a positive infinity, and whether it is a NaN."""
        with self._lock, undisturbed():
            column = self._sheet.rows
            rows = column.stack()[:, NAN : POSINF + 1]
            bad = rows.any(1).nonzero().flatten().tolist()
            found: dict[int, bool] = {}
            for one in bad:  # pieces of one tensor share a row
                number = column.numbers[one]
                found[number] = found.get(number, False) or bool(rows[one, 0])
            return found

    def take(self) -> _OnItsWay:
        """Hand over everything since the last take and start again from row 0."""
        with self._lock:
            sheet, self._sheet = self._sheet, _Sheet()
        has_events = self._device.type != "cpu" and not self._is_copied
        event = torch.get_device_module(self._device).Event() if has_events else None
        return _OnItsWay(sheet, event)

    def _number(self) -> tuple[_Sheet, int]:
        number = self._sheet.count
        self._sheet.count += 1
        return self._sheet, number

    def _receive(self, values: Tensor) -> Tensor:
        if values.device.type != self._device.type:
            raise UnsupportedTensor(
                f"This log measures tensors on `{self._device}` and was given one on "
                f"`{values.device}`. Measure it with `open_log({str(values.device)!r})`."
            )
        return values.cpu() if self._is_copied else values

    def _sketch(self, prepared: Prepared, values: Tensor) -> list[Tensor]:
        if prepared.positions is not None:
            positions = prepared.positions.to(values.device)
            return [reference.sketch(values, positions=positions)]
        first = range(0, values.numel() // SKETCH_WIDTH + 1, _PIECE // SKETCH_WIDTH)
        pieces = values.split(_PIECE)
        return [reference.sketch(piece, start) for piece, start in zip(pieces, first, strict=False)]


def _repeat(row: Tensor, repeats: int) -> Tensor:
    """Give the row of numbers that stand there several times."""
    if repeats == 1:
        return row
    factors = [repeats] * 4 + [1, 1, 1, repeats]
    return row * torch.tensor(factors, dtype=torch.float64).to(row.device, non_blocking=True)


def _zeros_row(count: int, device: torch.device) -> Tensor:
    row = torch.zeros(8, dtype=torch.float64, device=device)
    row[0] = count
    return row
