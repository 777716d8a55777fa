"""The log of a CUDA device: Triton kernels write rows there, and one copy brings a step's rows out.

Nothing here waits for the device but `wait` of what was taken, which is meant for another thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline._torch import (
    current_cuda_device,
    has_function_mode,
    is_functorch_active,
    raw_cuda_stream,
)
from hookline.stats import kernels
from hookline.stats.launching import Launcher
from hookline.stats.logs import BINS, SKETCH_WIDTH, Extras, Measured, Taken
from hookline.stats.preparing import (
    PLAIN,
    Prepared,
    prepare,
    prepare_update,
    undisturbed,
    widen,
)
from hookline.stats.rows import COLUMNS, FINITE, M2, MAX, MEAN, MIN, NAN, NEGINF, POSINF, merge_rows

_MOST_PROGRAMS = 256
"""Partial rows of one tensor: about two programs for each multiprocessor of a large GPU."""

_SLOTS = 512
"""Tensors measured before their partial rows are merged: 8 MiB of them."""

_WIDTH = len(COLUMNS)
_SLOT_BYTES = _MOST_PROGRAMS * _WIDTH * 8
_LARGE = 1 << 31

_BLOCK = 1024
_UNROLL = 8
TOGETHER = 8
"""How many tensors one launch can measure."""

_SHARES = 64
_ALONE = 1 << 26
"""Elements of a tensor that is worth a launch of its own."""

_SKETCH_PROGRAMS = 128
_SKETCH_ROWS = 64
_COUNT_PROGRAMS = 256
_COUNT_BLOCK = 1024

# Exact as float32, so that a few of them may be added there.
_NARROW = frozenset({torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16})
# Exact as float32, one by one.
_SINGLE = _NARROW | {torch.float32}
_DIRECT = _NARROW | {torch.float32, torch.float64, torch.int32, torch.int64}


class _Step:
    """What was measured since the last take, besides the rows in the slots."""

    def __init__(self) -> None:
        self.merged: list[Tensor] = []
        """Rows that are merged already, of earlier slots."""
        self.sketched: list[int] = []
        self.sketches: list[Tensor] = []
        self.counted: list[int] = []
        self.counts: list[Tensor] = []
        self.updated: list[int] = []
        self.updates: list[Tensor] = []
        self.compressed: dict[int, tuple[int, int]] = {}
        """Rows of tensors that repeat their elements, or leave zeros out: how often, how many."""


class CudaTaken:
    """Numbers of a step on their way to the host."""

    def __init__(
        self, host: Tensor, event: torch.cuda.Event, sizes: tuple[int, ...], step: _Step
    ) -> None:
        self._host = host
        self._event = event
        self._sizes = sizes
        self._step = step

    def wait(self) -> Measured:
        """Wait for the copy."""
        self._event.synchronize()
        flat = self._host.numpy()
        ends = np.cumsum(self._sizes)
        rows, sketches, counts, updates = (
            flat[end - size : end].copy() for end, size in zip(ends, self._sizes, strict=True)
        )
        step = self._step
        measured = Measured(
            rows=rows.reshape(-1, _WIDTH),
            sketched=np.array(step.sketched, dtype=np.int64),
            sketches=sketches.reshape(-1, SKETCH_WIDTH).astype(np.float32),
            counted=np.array(step.counted, dtype=np.int64),
            counts=counts.reshape(-1, 3 + BINS)[:, :3].copy(),
            histograms=counts.reshape(-1, 3 + BINS)[:, 3:].astype(np.int64),
            updated=np.array(step.updated, dtype=np.int64),
            updates=updates.reshape(-1, 2),
        )
        for row, (repeats, zeros) in step.compressed.items():
            _expand(measured, row, repeats, zeros)
        return measured


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


class CudaLog:
    """Measure tensors of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", self._index)
        with torch.inference_mode(False):  # they are written to inside and outside of it
            self._partials = torch.empty(
                (_SLOTS, _MOST_PROGRAMS, _WIDTH), dtype=torch.float64, device=self._device
            )
            self._programs = torch.zeros(_SLOTS, dtype=torch.int32, device=self._device)
        self._rows_at = self._partials.data_ptr()
        self._programs_at = self._programs.data_ptr()
        self._step = _Step()
        self._slot = 0
        self._base = 0
        """The number of the row in slot 0."""
        self._ready: dict[tuple[torch.dtype, bool], Any] = {}
        """Compiled kernels for plain tensors: by dtype, and whether their address is aligned."""
        self._lock = threading.Lock()
        self._eight = {
            kind: Launcher(
                kernels.measure_eight,
                MOST=_MOST_PROGRAMS,
                SHARES=_SHARES,
                BLOCK=_BLOCK,
                UNROLL=2 * _UNROLL,
                WIDE=kind not in _NARROW,
            )
            for kind in (torch.bfloat16, torch.float16, torch.float32)
        }
        self._streams: dict[int, torch.cuda.Stream] = {}
        common = {"BLOCK": _BLOCK, "UNROLL": _UNROLL}
        self._measure = {
            wide: Launcher(kernels.measure, **common, WIDE=wide) for wide in (False, True)
        }
        self._sketch = {
            wide: Launcher(kernels.sketch, ROWS=_SKETCH_ROWS, WIDE=wide) for wide in (False, True)
        }
        self._count: dict[Any, Launcher] = {}
        self._update = {
            has: Launcher(kernels.measure_update, HAS_GRAD=has, BLOCK=_COUNT_BLOCK)
            for has in (False, True)
        }

        if Launcher.is_quick is None:
            Launcher.is_quick = self._try_short_way()

    def _try_short_way(self) -> bool:
        """Compare the two ways to launch: the short one stands on how Triton is made inside."""
        sample = torch.arange(5, dtype=torch.float32, device=self._device)
        try:
            for is_quick in (False, True):
                Launcher.is_quick = is_quick
                self.add(sample)
            usual, short = self.take().wait().rows
        except (AttributeError, TypeError):
            self._slot = 0
            return False
        return bool((usual == short).all())

    def add(self, tensor: Tensor, extras: int = 0) -> int:
        """Measure a tensor as it is now; give the number of its row since the last take."""
        if has_function_mode():  # it would see every look at the tensor
            with torch._C.DisableTorchFunction():
                return self._add(tensor, extras)
        return self._add(tensor, extras)

    def _add(self, tensor: Tensor, extras: int) -> int:
        if not extras and _is_direct(tensor):
            row = self._add_directly(tensor)
            if row >= 0:
                return row
        prepared = None
        if extras or not _is_direct(tensor):
            prepared = prepare(tensor)
            values = _kernel_ready(prepared.values)
        else:
            values = tensor
        with self._lock, self._on_device():
            stream = self._use_stream()
            row, slot = self._next_slot()
            self._launch_measure(values, slot, stream)
            if prepared is not None:
                if prepared.repeats > 1 or prepared.zeros:
                    self._step.compressed[row] = (prepared.repeats, prepared.zeros)
                if extras & Extras.SKETCH:
                    self._step.sketched.append(row)
                    self._step.sketches.append(self._sketch_of(tensor, stream))
                if extras & Extras.COUNTS:
                    self._step.counted.append(row)
                    self._step.counts.append(self._counts_of(values, prepared, stream))
        return row

    def add_together(self, tensors: Sequence[Tensor]) -> list[int]:
        """Measure up to `TOGETHER` tensors in one launch, if they are alike; give their rows."""
        if has_function_mode():
            return [self.add(one) for one in tensors]
        kind = tensors[0].dtype
        launcher = self._eight.get(kind)
        sizes = [one.numel() for one in tensors]
        if launcher is None or max(sizes) >= _ALONE or not all(map(_is_direct, tensors)):
            return [self.add(one) for one in tensors]
        places = [one.data_ptr() for one in tensors]
        if any(one.dtype is not kind for one in tensors) or any(at & 15 for at in places):
            return [self.add(one) for one in tensors]
        count = len(tensors)
        missing = TOGETHER - count
        sizes += [0] * missing
        places += places[:1] * missing
        with self._lock, self._on_device():
            stream = self._use_stream()
            if self._slot + TOGETHER > _SLOTS:
                with undisturbed():
                    self._merge()
            slot, row = self._slot, self._base + self._slot
            self._slot += count
            launcher(
                kind,
                count * _SHARES,
                stream,
                (
                    *places,
                    *sizes,
                    self._rows_at + slot * _SLOT_BYTES,
                    self._programs_at + 4 * slot,
                ),
                lambda: (
                    *tensors,
                    *[tensors[0]] * missing,
                    *sizes,
                    self._partials[slot:],
                    self._programs[slot:],
                ),
            )
        return list(range(row, row + count))

    def _add_directly(self, tensor: Tensor) -> int:
        """Measure a plain tensor of a known kind, in few steps; -1 where it takes more."""
        at, size = tensor.data_ptr(), tensor.numel()
        compiled = self._ready.get((tensor.dtype, at & 15 == 0))
        if compiled is None or not 0 < size < _LARGE or current_cuda_device() != self._index:
            return -1
        stream = raw_cuda_stream(self._index)
        with self._lock:
            slot = self._slot
            if stream not in self._streams or slot == _SLOTS:
                return -1
            self._slot = slot + 1
            row: int = self._base + slot
            compiled.run(
                min(-(-size // _BLOCK), _MOST_PROGRAMS),
                1,
                1,
                stream,
                compiled.function,
                compiled.packed_metadata,
                None,
                None,
                None,
                at,
                size,
                self._rows_at + slot * _SLOT_BYTES,
                self._programs_at + 4 * slot,
                _BLOCK,
                _UNROLL,
                tensor.dtype not in _NARROW,
            )
        return row

    def _launch_measure(self, values: Tensor, slot: int, stream: int) -> None:
        size = values.numel()
        if not size:
            return
        at, kind = values.data_ptr(), values.dtype
        launcher = self._measure[kind not in _NARROW]
        launcher(
            (kind, at % 16 == 0, size >= _LARGE),
            min(-(-size // _BLOCK), _MOST_PROGRAMS),
            stream,
            (at, size, self._rows_at + slot * _SLOT_BYTES, self._programs_at + 4 * slot),
            lambda: (values, size, self._partials[slot], self._programs[slot:]),
        )
        if size < _LARGE and Launcher.is_quick:
            self._ready[kind, at % 16 == 0] = launcher.compiled[kind, at % 16 == 0, False]

    def _sketch_of(self, tensor: Tensor, stream: int) -> Tensor:
        ordered = prepare(tensor, ordered=True)
        with undisturbed():
            if ordered.positions is not None:
                dense = torch.zeros(tensor.numel(), dtype=torch.float64, device=self._device)
                flat = ordered.values.reshape(-1).to(torch.float64)
                values = dense.index_put_((ordered.positions,), flat)
            else:
                values = _kernel_ready(ordered.values)
            size = values.numel()
            if not size:
                return torch.zeros(SKETCH_WIDTH, dtype=torch.float64, device=self._device)
            programs = min(-(-size // (_SKETCH_ROWS * SKETCH_WIDTH)), _SKETCH_PROGRAMS)
            out = torch.empty((programs, SKETCH_WIDTH), dtype=torch.float64, device=self._device)
            at = values.data_ptr()
            self._sketch[values.dtype not in _SINGLE](
                (values.dtype, at % 16 == 0, size >= _LARGE),
                programs,
                stream,
                (at, size, out.data_ptr()),
                lambda: (values, size, out),
            )
            return out.sum(0)

    def _counts_of(self, values: Tensor, prepared: Prepared, stream: int) -> Tensor:
        size, kind = values.numel(), values.dtype
        with undisturbed():
            out = torch.zeros(4 + BINS, dtype=torch.int64, device=self._device)
            if size:
                at = values.data_ptr()
                launcher = self._count.get((kind, prepared.limits))
                if launcher is None:
                    # Constants, because Triton takes a number that is none as float32.
                    tiny, huge = prepared.limits
                    wide = kind not in _SINGLE
                    launcher = Launcher(
                        kernels.count, TINY=tiny, HUGE=huge, BLOCK=_COUNT_BLOCK, WIDE=wide
                    )
                    self._count[kind, prepared.limits] = launcher
                launcher(
                    (kind, at % 16 == 0, size >= _LARGE),
                    min(-(-size // _COUNT_BLOCK), _COUNT_PROGRAMS),
                    stream,
                    (at, size, out.data_ptr(), out.data_ptr() + 32),
                    lambda: (values, size, out, out[4:]),
                )
            return torch.cat((out[:3], out[4:])).to(torch.float64)

    def add_update(self, before: Tensor, after: Tensor, grad: Tensor | None = None) -> int:
        """Measure `after - before`, and how many elements with a gradient did not change."""
        given = (before, after) if grad is None else (before, after, grad)
        if has_function_mode() or not _are_alike(given):
            old, new, slope = (
                None if one is None else _kernel_ready(one)
                for one in prepare_update(before, after, grad)
            )
            assert old is not None
            assert new is not None
            slope = new if slope is None else slope
        else:
            old, new, slope = before, after, after if grad is None else grad
        size = new.numel()
        with self._lock, self._on_device(), undisturbed():
            stream = self._use_stream()
            row, slot = self._next_slot()
            counts = torch.zeros(2, dtype=torch.int64, device=self._device)
            if size:
                tensors = (old, new, slope)
                places = [one.data_ptr() for one in tensors]
                kinds = (one.dtype for one in tensors)
                self._update[grad is not None](
                    (*kinds, *(at % 16 == 0 for at in places), size >= _LARGE),
                    min(-(-size // _COUNT_BLOCK), _MOST_PROGRAMS),
                    stream,
                    (
                        *places,
                        size,
                        self._rows_at + slot * _SLOT_BYTES,
                        self._programs_at + 4 * slot,
                        counts.data_ptr(),
                    ),
                    lambda: (*tensors, size, self._partials[slot], self._programs[slot:], counts),
                )
            self._step.updated.append(row)
            self._step.updates.append(counts)
        return row

    def take(self) -> Taken:
        """Hand over everything since the last take and start again from row 0."""
        with self._lock, self._on_device(), undisturbed():
            self._merge()
            step, self._step = self._step, _Step()
            self._base = 0
            groups = (
                [one.flatten() for one in step.merged],
                step.sketches,
                step.counts,
                [torch.stack(step.updates).flatten().to(torch.float64)] if step.updates else [],
            )
            sizes = tuple(sum(one.numel() for one in group) for group in groups)
            flat = torch.cat([one for group in groups for one in group])
            host = torch.empty(flat.shape, dtype=torch.float64, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._index))
            return CudaTaken(host, event, sizes, step)

    def _on_device(self) -> AbstractContextManager[Any]:
        if current_cuda_device() == self._index:
            return contextlib.nullcontext()
        return torch.cuda.device(self._index)

    def _use_stream(self) -> int:
        """Give the stream that work goes to now; all that were used are remembered."""
        stream: int = raw_cuda_stream(self._index)
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.current_stream(self._index)
        return stream

    def _next_slot(self) -> tuple[int, int]:
        """Give the number of the next row, and the slot for its parts."""
        if self._slot == _SLOTS:
            with undisturbed():
                self._merge()
        slot = self._slot
        self._slot += 1
        return self._base + slot, slot

    def _merge(self) -> None:
        """Merge the partial rows so far, and begin again at the first slot."""
        here = torch.cuda.current_stream(self._index)
        for raw, other in self._streams.items():
            if raw != here.cuda_stream:
                here.wait_stream(other)
        rows = torch.empty((self._slot, _WIDTH), dtype=torch.float64, device=self._device)
        if self._slot:
            kernels.reduce_rows[(self._slot,)](
                self._partials, self._programs, rows, MOST=_MOST_PROGRAMS, num_warps=4
            )
            self._programs.zero_()
        for raw, other in self._streams.items():
            if raw != here.cuda_stream:
                other.wait_stream(here)  # the slots are written again there
        self._streams = {here.cuda_stream: here}
        self._step.merged.append(rows)
        self._base += self._slot
        self._slot = 0


def _is_direct(tensor: Tensor) -> bool:
    """Tell whether a kernel can read a tensor as it is."""
    if type(tensor) not in PLAIN or tensor.dtype not in _DIRECT or is_functorch_active():
        return False
    return (
        tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        # Where memory was freed, the address is that of the offset into nothing.
        and tensor.data_ptr() > 8 * tensor.storage_offset()
    )


def _kernel_ready(values: Tensor) -> Tensor:
    """Give numbers in a dtype that the kernels read."""
    with undisturbed():
        values = values.view(torch.uint8) if values.dtype is torch.bool else widen(values)
        return values if values.dtype in _DIRECT else values.to(torch.float64)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Tell whether a kernel can read tensors side by side as they are."""
    return all(_is_direct(one) and one.shape == tensors[0].shape for one in tensors)
