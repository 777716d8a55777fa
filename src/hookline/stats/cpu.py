"""The log of tensors on the CPU: the compiled kernel where there is one, else torch operations.

Each tensor is measured when it is added, in one pass over its memory; what is taken is there at
once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline._errors import UnsupportedTensor
from hookline._torch import has_function_mode
from hookline.stats import blocks, compiled, reference
from hookline.stats.compiled import KINDS
from hookline.stats.logs import BINS, SKETCH_WIDTH, Extras, Update
from hookline.stats.preparing import (
    PLAIN,
    SHORTEST_RUN,
    Prepared,
    find_layout,
    flatten,
    limits_of,
    prepare,
    prepare_update,
    undisturbed,
    widen,
)
from hookline.stats.rows import FINITE, M2, NEGINF, Rows, empty_rows, merge_rows
from hookline.stats.sheets import Sheet

# No memory lies below, where there is one; an offset into a storage that was freed may.
_LOWEST_ADDRESS = 1 << 40
# Up to here other threads would wait longer for their turn than the kernel takes.
_SMALL = 1 << 13
_LARGE = 1 << 20

_SKETCH, _COUNTS = int(Extras.SKETCH), int(Extras.COUNTS)
# Under a function mode every question to a tensor would go through the mode.


class CpuLog:
    """Measure tensors on the CPU; see `Log`."""

    def __init__(self, *, use_compiled: bool = True) -> None:
        self._library = compiled.load() if use_compiled else None
        self._lock = threading.Lock()
        self._sheet = Sheet()

    def add(self, tensor: Tensor, extras: int = 0) -> int:
        """Measure a tensor as it is now; give the number of its row since the last take."""
        if has_function_mode():
            with torch._C.DisableTorchFunction():
                return self.add(tensor, extras)
        library = self._library
        found = None if library is None else _locate(tensor, extras)
        if library is None or found is None:
            return self._add_prepared(tensor, extras)
        address, count, kind, run = found
        counts = None
        sheet, number = self._sheet, -1
        try:  # around it all: an interrupt may come between any two calls
            with self._lock:
                sheet = self._sheet
                number = sheet.rows.count
                row = sheet.rows.reserve()
                sketch = sheet.reserve_sketch(number) if extras & _SKETCH else None
                if count <= _SMALL and not extras & _COUNTS and run is None:
                    library.measure_small(address, count, kind, 1, row, sketch)
                    return number
                if extras & _COUNTS:
                    counts = sheet.reserve_counts(number)
                sheet.running.add(number)
            threads = _threads_for(count)
            if run is None:
                _check(library.measure(address, count, kind, threads, row, sketch))
            else:
                _check(library.measure_runs(address, count, kind, threads, row, sketch, *run))
            if counts is not None:
                library.count(address, count, kind, *limits_of(tensor.dtype), *counts)
        finally:
            sheet.running.discard(number)
        return number

    def add_update(self, before: Tensor, after: Tensor, grad: Tensor | None = None) -> int:
        """Measure `after - before`, and how many elements with a gradient did not change."""
        if has_function_mode():
            with torch._C.DisableTorchFunction():
                return self.add_update(before, after, grad)
        library = self._library
        given = (before, after) if grad is None else (before, after, grad)
        found = None if library is None else _locate_together(given)
        if library is None or found is None:
            return self._add_prepared_update(before, after, grad)
        addresses, count, kind = found
        sheet, number = self._sheet, -1
        try:
            with self._lock:
                sheet = self._sheet
                number = sheet.rows.count
                row, update = sheet.rows.reserve(), sheet.reserve_update(number)
                sheet.running.add(number)
            _check(library.update(*addresses, count, kind, _threads_for(count), row, update))
        finally:
            sheet.running.discard(number)
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
        """Give the rows that have a NaN or a positive infinity, and which of these."""
        return self._sheet.find_bad()

    def take(self) -> Sheet:
        """Hand over everything since the last take and start again from row 0."""
        with self._lock:
            taken, self._sheet = self._sheet, Sheet()
        return taken

    def _add_prepared_update(self, before: Tensor, after: Tensor, grad: Tensor | None) -> int:
        """Measure an update of tensors that are not simply numbers side by side."""
        old, new, slope = prepare_update(before, after, grad)
        _check_device(old)
        if self._library is None:
            with undisturbed():
                along = None if slope is None else flatten(slope)
                row, update = blocks.update(flatten(old), flatten(new), along)
        else:
            row, update = np.empty(8), np.empty(2)
            count = old.numel()
            addresses = (
                old.data_ptr(),
                new.data_ptr(),
                slope.data_ptr() if slope is not None else None,
            )
            places = row.ctypes.data, update.ctypes.data
            kind, threads = KINDS[old.dtype], _threads_for(count)
            _check(self._library.update(*addresses, count, kind, threads, *places))
        with self._lock:
            sheet = self._sheet
            sheet.updated.append(sheet.rows.count)
            sheet.rows.append(row)
            sheet.updates.append(update)
            return sheet.updated[-1]

    def _add_prepared(self, tensor: Tensor, extras: int) -> int:
        """Measure a tensor that is not simply numbers side by side."""
        # The counts and a wider dtype both need the numbers side by side.
        has_runs = self._library is not None and not extras & _COUNTS and tensor.dtype in KINDS
        shortest = SHORTEST_RUN if has_runs else 0
        prepared = prepare(tensor, ordered=bool(extras & _SKETCH), shortest_run=shortest)
        _check_device(prepared.values)
        with undisturbed():
            row, sketch = self._measure(prepared, extras)
            counts, histogram = self._count(prepared) if extras & _COUNTS else (None, None)
        with self._lock:
            sheet = self._sheet
            number = sheet.rows.count
            sheet.rows.append(row)
            if sketch is not None:
                sheet.sketched.append(number)
                sheet.sketches.append(sketch)
            if counts is not None and histogram is not None:
                sheet.counted.append(number)
                sheet.counts.append(counts)
                sheet.histograms.append(histogram)
        return number

    def _measure(
        self, prepared: Prepared, extras: int
    ) -> tuple[Rows, npt.NDArray[np.float32] | None]:
        """Give the row and, if asked for, the sketch of prepared numbers."""
        library = self._library
        values = widen(prepared.values)
        sketch = np.empty(SKETCH_WIDTH, dtype=np.float32) if extras & _SKETCH else None
        is_plain = library is not None and prepared.positions is None
        if library is not None:
            row = np.empty(8)
            count = values.numel()
            given = (
                values.data_ptr(),
                count,
                KINDS[values.dtype],
                _threads_for(count),
                row.ctypes.data,
                sketch.ctypes.data if sketch is not None and is_plain else None,
            )
            if prepared.run is None:
                _check(library.measure(*given))
            else:
                _check(library.measure_runs(*given, *prepared.run))
        else:
            row = blocks.measure(flatten(values))
        if sketch is not None and not is_plain:
            sums = reference.sketch(flatten(values), positions=prepared.positions)
            sketch[:] = sums.to(torch.float32).numpy()
        return complete(row, prepared), sketch

    def _count(self, prepared: Prepared) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Give the counts and the histogram of prepared numbers."""
        values = widen(prepared.values)
        if self._library is not None:
            counts, histogram = np.empty(3), np.empty(BINS, dtype=np.int64)
            address, count = values.data_ptr(), values.numel()
            self._library.count(
                address,
                count,
                KINDS[values.dtype],
                *prepared.limits,
                counts.ctypes.data,
                histogram.ctypes.data,
            )
        else:
            counted, bins = reference.count(flatten(values), prepared.limits)
            counts, histogram = counted.numpy(), bins.numpy()
        counts, histogram = counts * prepared.repeats, histogram * prepared.repeats
        counts[0] += prepared.zeros
        histogram[0] += prepared.zeros
        return counts, histogram


def _locate(tensor: Tensor, extras: int) -> tuple[int, int, int, tuple[int, int] | None] | None:
    """Give where a tensor lies, its size, its kind and its run; None if it is not that simple."""
    if type(tensor) not in PLAIN:
        return None
    try:
        kind = KINDS.get(tensor.dtype)
        address = tensor.data_ptr()
        if kind is None or address < _LOWEST_ADDRESS or not tensor.is_cpu or tensor.is_neg():
            return None
        if tensor.is_contiguous():
            return address, tensor.numel(), kind, None
        layout = find_layout(tensor.shape, tensor.stride(), bool(extras & _SKETCH))
    except RuntimeError:  # one without memory of its own, such as a sparse one
        return None
    if layout.repeated:
        return None
    if layout.is_dense:
        return address, tensor.numel(), kind, None
    if layout.run is None or layout.run[0] < SHORTEST_RUN or extras & _COUNTS:
        return None
    return address, tensor.numel(), kind, layout.run


def _locate_together(
    tensors: tuple[Tensor, ...],
) -> tuple[tuple[int, int, int | None], int, int] | None:
    """Give where tensors lie that have one size, kind and order; None if they differ."""
    first = tensors[0]
    addresses: list[int | None] = []
    for tensor in tensors:
        found = _locate(tensor, _SKETCH)
        if found is None or found[3] is not None or tensor.shape != first.shape:
            return None
        if found[2] != KINDS[first.dtype]:
            return None
        addresses.append(found[0])
    return (*addresses, None)[:3], first.numel(), KINDS[first.dtype]  # type: ignore[return-value]


def complete(row: Rows, prepared: Prepared) -> Rows:
    """Give the row of a whole tensor from that of the numbers it holds."""
    if prepared.repeats > 1:
        row[FINITE : NEGINF + 1] *= prepared.repeats
        row[M2] *= prepared.repeats
    if prepared.zeros:
        zeros = empty_rows(1)[0]
        zeros[:] = (prepared.zeros, 0, 0, 0, 0, 0, 0, 0)
        row = merge_rows(np.stack([row, zeros]), [0, 0], 1)[0]
    return row


def _threads_for(count: int) -> int:
    return torch.get_num_threads() if count >= _LARGE else 1


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("There is no memory left to measure a tensor with.")


def _check_device(values: Tensor) -> None:
    if not values.is_cpu:
        raise UnsupportedTensor(
            f"This log measures tensors on the CPU and was given one on `{values.device}`. "
            f"Measure it with `open_log({str(values.device)!r})`."
        )
