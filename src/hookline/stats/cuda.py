"""The log of a CUDA device: Triton kernels write rows there, and one copy brings a step's rows out.

Nothing here waits for the device but `wait` of what was taken, which is meant for another thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hookline._errors import UnsupportedTensor
from hookline._torch import (
    current_cuda_device,
    has_function_mode,
    is_functorch_active,
    raw_cuda_stream,
)
from hookline.stats import extra_kernels, kernels
from hookline.stats.arriving import PARTIAL_WIDTH, CudaStep, CudaTaken
from hookline.stats.launching import Launcher
from hookline.stats.logs import BINS, SKETCH_WIDTH, Extras, Taken, Update
from hookline.stats.preparing import (
    PLAIN,
    Prepared,
    prepare,
    prepare_update,
    undisturbed,
    widen,
)
from hookline.stats.rows import NAN, POSINF

_MOST_PROGRAMS = 256
"""Partial rows of one tensor: about two programs for each multiprocessor of a large GPU."""

_SLOTS = 512
"""Tensors measured before their partial rows are merged: 8 MiB of them."""

_SLOT_BYTES = _MOST_PROGRAMS * PARTIAL_WIDTH * 8
_LARGE = 1 << 31

_BLOCK = 1024
_UNROLL = 8
TOGETHER = 8
"""How many tensors one launch can measure."""

_SHARES = 64
_ALONE = 1 << 26
"""Elements of a tensor that is worth a launch of its own."""

_UPDATES_TOGETHER = 4
_UPDATE_SHARES = 128
_SKETCH_PROGRAMS = 128
_SKETCH_ROWS = 64
_COUNT_PROGRAMS = 256
_COUNT_BLOCK = 1024

# Exact as float32, so that a few of them may be added there.
_NARROW = frozenset({torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16})
# Exact as float32, one by one.
_SINGLE = _NARROW | {torch.float32}
_DIRECT = _NARROW | {torch.float32, torch.float64, torch.int32, torch.int64}


class CudaLog:
    """Measure tensors of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", self._index)
        if is_functorch_active():
            raise UnsupportedTensor("nothing is measured inside `torch.func` before outside of it")
        with torch.inference_mode(False):  # they are written to inside and outside of it
            self._partials = torch.empty(
                (_SLOTS, _MOST_PROGRAMS, PARTIAL_WIDTH), dtype=torch.float64, device=self._device
            )
            self._programs = torch.zeros(_SLOTS, dtype=torch.int32, device=self._device)
        self._rows_at = self._partials.data_ptr()
        self._programs_at = self._programs.data_ptr()
        self._step = CudaStep()
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
            wide: Launcher(extra_kernels.sketch, ROWS=_SKETCH_ROWS, WIDE=wide)
            for wide in (False, True)
        }
        self._count: dict[Any, Launcher] = {}
        self._update = {
            has: Launcher(
                kernels.measure_four_updates,
                MOST=_MOST_PROGRAMS,
                SHARES=_UPDATE_SHARES,
                HAS_GRAD=has,
                BLOCK=_COUNT_BLOCK,
            )
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
            with torch._C.DisableTorchFunction():
                return self.add_together(tensors)
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
                        extra_kernels.count, TINY=tiny, HUGE=huge, BLOCK=_COUNT_BLOCK, WIDE=wide
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
        return self.add_updates([(before, after, grad)])[0]

    def add_updates(self, updates: Sequence[Update]) -> list[int]:
        """Measure some updates, several in one launch where they are alike."""
        if has_function_mode():
            with torch._C.DisableTorchFunction():
                return self.add_updates(updates)
        rows: list[int] = []
        alike: list[Update] = []
        for update in updates:
            if alike and (len(alike) == _UPDATES_TOGETHER or not _goes_with(update, alike[0])):
                rows += self._launch_updates(alike)
                alike = []
            alike.append(update if _is_simple(update) else _simplify(update))
        return rows + self._launch_updates(alike)

    def _launch_updates(self, updates: list[Update]) -> list[int]:
        count = len(updates)
        columns: list[list[Tensor]] = [
            [one[0] for one in updates],
            [one[1] for one in updates],
            [one[1] if one[2] is None else one[2] for one in updates],
        ]
        sizes = [one[1].numel() for one in updates]
        has_grad = updates[0][2] is not None
        with self._lock, self._on_device():
            stream = self._use_stream()
            if self._slot + count > _SLOTS:
                with undisturbed():
                    self._merge()
            slot, row = self._slot, self._base + self._slot
            self._slot += count
            rows = list(range(row, row + count))
            self._step.updated += rows
            if not any(sizes):
                return rows
            missing = _UPDATES_TOGETHER - count
            tensors = [one for column in columns for one in (*column, *[column[0]] * missing)]
            sizes += [0] * missing
            places = [one.data_ptr() for one in tensors]
            kinds = tuple(column[0].dtype for column in columns)
            aligned = tuple(at % 16 == 0 for at in places)
            self._update[has_grad](
                (*kinds, aligned if not all(aligned) else True, max(sizes) >= _LARGE),
                count * _UPDATE_SHARES,
                stream,
                (
                    *places,
                    *sizes,
                    self._rows_at + slot * _SLOT_BYTES,
                    self._programs_at + 4 * slot,
                ),
                lambda: (*tensors, *sizes, self._partials[slot:], self._programs[slot:]),
            )
        return rows

    def find_bad(self) -> dict[int, bool]:
        """Give the rows that have a NaN or a positive infinity, and whether it is a NaN."""
        with self._lock, self._on_device(), undisturbed():
            self._merge()
            rows = torch.cat(self._step.merged)[:, NAN : POSINF + 1]
            is_bad = rows.any(1)
            with _allow_waiting():
                if not is_bad.any().item():  # one number, where all is well
                    return {}
                bad = is_bad.nonzero().flatten()
                return dict(zip(bad.tolist(), (rows[bad, 0] > 0).tolist(), strict=True))

    def take(self) -> Taken:
        """Hand over everything since the last take and start again from row 0."""
        with self._lock, self._on_device(), undisturbed():
            self._merge()
            step, self._step = self._step, CudaStep()
            self._base = 0
            groups = (
                [one.flatten() for one in step.merged],
                step.sketches,
                step.counts,
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
        rows = torch.empty((self._slot, PARTIAL_WIDTH), dtype=torch.float64, device=self._device)
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


@contextlib.contextmanager
def _allow_waiting() -> Iterator[None]:
    """Wait for the device also where somebody looks for who does: this is meant."""
    mode = torch.cuda.get_sync_debug_mode()
    if mode:
        torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


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


def _is_simple(update: Update) -> bool:
    """Tell whether a kernel can read an update as it is."""
    before, after, grad = update
    given = (before, after) if grad is None else (before, after, grad)
    return all(_is_direct(one) and one.shape == before.shape for one in given)


def _simplify(update: Update) -> Update:
    """Give an update as tensors that a kernel can read."""
    before, after, grad = prepare_update(*update)
    return (
        _kernel_ready(before),
        _kernel_ready(after),
        None if grad is None else _kernel_ready(grad),
    )


def _goes_with(update: Update, other: Update) -> bool:
    """Tell whether two updates can be measured in one launch."""
    if not _is_simple(update):
        return False
    kinds = [[None if one is None else one.dtype for one in each] for each in (update, other)]
    return kinds[0] == kinds[1] and max(update[1].numel(), other[1].numel()) < _LARGE
