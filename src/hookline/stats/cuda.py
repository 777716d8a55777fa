"""The log of a CUDA device: Triton kernels write rows there, and one copy brings a step's rows out.

Nothing here waits for the device but `wait` of what was taken, which is meant for another thread.
"""

from __future__ import annotations

import contextlib
import functools
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
    is_capturing_cuda_graph,
    is_functorch_active,
    raw_cuda_stream,
)
from hookline.stats import kernels, update_kernels
from hookline.stats.arriving import PARTIAL_WIDTH, CudaStep, CudaTaken
from hookline.stats.cuda_extras import ExtraKernels
from hookline.stats.launching import Launcher
from hookline.stats.logs import TOGETHER, Extras, Taken, Update
from hookline.stats.measuring import LARGE, Measuring, is_direct
from hookline.stats.preparing import prepare, prepare_update, undisturbed
from hookline.stats.readings import READABLE
from hookline.stats.repeating import Launch, Part, Repeat
from hookline.stats.rows import NAN, POSINF
from hookline.stats.slots import MOST_PROGRAMS, SLOT_BYTES, SLOTS, Slots

_ALONE = 1 << 26
"""Elements of a tensor that is worth a launch of its own."""

_UPDATES_TOGETHER = 4
_UPDATE_SHARES = 128
_UPDATE_BLOCK = 1024
_UPDATABLE = frozenset(
    {
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)


_RECORDED = "it runs in a CUDA graph, whose replays run no Python"


def _refuse_recording(tensor: Tensor) -> None:
    """Raise where a CUDA graph is recorded: a replay would write into rows of another step."""
    if is_capturing_cuda_graph(tensor):
        raise UnsupportedTensor(_RECORDED)


class CudaLog:
    """Measure tensors of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", self._index)
        if is_functorch_active():
            raise UnsupportedTensor("nothing is measured inside `torch.func` before outside of it")
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedTensor(_RECORDED)
        self._slots = Slots(self._index)
        self._step = CudaStep()
        self._lock = threading.Lock()
        self._measuring = Measuring(self._index)
        self._ready = self._measuring.ready
        self._extras = ExtraKernels(self._index)
        self._several: dict[torch.dtype, tuple[Launcher, int, int]] = {}
        self._update = {
            has: Launcher(
                update_kernels.measure_four_updates,
                MOST=MOST_PROGRAMS,
                SHARES=_UPDATE_SHARES,
                HAS_GRAD=has,
                BLOCK=_UPDATE_BLOCK,
            )
            for has in (False, True)
        }
        if Launcher.is_quick is None:
            Launcher.is_quick = self._try_short_way()

    def _try_short_way(self) -> bool:
        """Compare the two ways to launch: the short one stands on how Triton is made inside.

        With the kernel that merges rows, because whatever is measured needs that one.
        """
        merging = Launcher(kernels.reduce_rows, warps=4, MOST=MOST_PROGRAMS)
        with self._on_device(), undisturbed():
            options: Any = {"dtype": torch.float64, "device": self._device}
            partials = torch.arange(1.0, MOST_PROGRAMS * PARTIAL_WIDTH + 1, **options)
            programs = torch.full((1,), 5, dtype=torch.int32, device=self._device)
            usual, short = torch.zeros((2, PARTIAL_WIDTH), **options)
            stream = raw_cuda_stream(self._index)
            try:
                for is_quick, out in ((None, usual), (True, short)):
                    Launcher.is_quick = is_quick
                    given = partials, programs, out
                    places = [one.data_ptr() for one in given]
                    merging("short", 1, stream, places, functools.partial(tuple, given))
            except (AttributeError, TypeError):
                return False
            with _allow_waiting():
                return torch.equal(usual, short)

    def add(self, tensor: Tensor, extras: int = 0) -> int:
        """Measure a tensor as it is now; give the number of its row since the last take."""
        if has_function_mode():  # it would see every look at the tensor
            with torch._C.DisableTorchFunction():
                return self._add(tensor, extras)
        return self._add(tensor, extras)

    def _add(self, tensor: Tensor, extras: int) -> int:
        _refuse_recording(tensor)
        if not extras:
            row = self._add_directly(tensor)
            if row >= 0:
                return row
        return self._add_prepared(tensor, extras)

    def _add_directly(self, tensor: Tensor) -> int:
        """Measure a plain tensor of a known kind, in few steps; -1 where it takes more."""
        ready = self._ready.get(tensor.dtype)
        if ready is None or not is_direct(tensor):
            return -1
        at, size = tensor.data_ptr(), tensor.numel()
        if at & 15 or not 0 < size < LARGE or current_cuda_device() != self._index:
            return -1
        launch, first, last, block, most = ready
        stream = raw_cuda_stream(self._index)
        slots = self._slots
        with self._lock:
            slot = slots.used
            if stream not in slots.streams or slot == SLOTS:
                return -1
            slots.used = slot + 1
            row: int = slots.base + slot
            launch(
                min(-(-size // block), most),
                1,
                1,
                stream,
                *first,
                at,
                size,
                slots.rows_at + slot * SLOT_BYTES,
                slots.programs_at + 4 * slot,
                *last,
            )
        return row

    def _add_prepared(self, tensor: Tensor, extras: int) -> int:
        """Measure a tensor of any kind."""
        is_counted = bool(extras & Extras.COUNTS)
        found = self._measuring.locate(tensor, with_runs=not is_counted)
        with self._lock, self._on_device():
            stream = self._slots.use_stream()
            slot, row = self._slots.reserve(1)
            self._measuring.launch(
                found, stream, self._slots.places(slot), lambda: self._slots.tensors(slot)
            )
            if found.repeats > 1 or found.zeros:
                self._step.compressed[row] = (found.repeats, found.zeros)
            if extras & Extras.SKETCH:
                self._step.sketched.append(row)
                ordered = prepare(tensor, ordered=True)
                self._step.sketches.append(self._extras.sketch(ordered, tensor.numel(), stream))
            if is_counted:
                self._step.counted.append(row)
                counts = self._extras.count(found.values, found.limits, stream)
                self._step.counts.append(counts)
        return row

    def add_together(self, tensors: Sequence[Tensor]) -> list[int]:
        """Measure up to `TOGETHER` tensors in one launch for each dtype; give their rows.

        What lies in the same memory as the one before is read once: a module and the one around
        it often have the same gradient, in other shapes.
        """
        if has_function_mode():
            with torch._C.DisableTorchFunction():
                return self.add_together(tensors)
        groups, readers = self._group(tensors)
        rows = [-1 if number in readers else self.add(one) for number, one in enumerate(tensors)]
        for kind, group in groups.items():
            read = [tensors[number] for number in group]
            first = self.add(read[0]) if len(read) == 1 else self._launch(kind, read)
            for row, number in enumerate(group, start=first):
                rows[number] = row
        for number, reader in readers.items():
            rows[number] = rows[reader]
        return rows

    def repeat(self, tensors: Sequence[Tensor]) -> Repeat | None:
        """Give what measures tensors like these, if one launch for each dtype can."""
        if has_function_mode():
            with torch._C.DisableTorchFunction():
                return self.repeat(tensors)
        if not Launcher.is_quick:
            return None
        if any(one.is_nested or one.get_device() != self._index for one in tensors):
            return None
        groups, readers = self._group(tensors)
        if len(readers) < len(tensors) or max(map(len, groups.values())) > TOGETHER:
            return None
        parts = [
            self._make_part(kind, group, [tensors[number].numel() for number in group])
            for kind, group in groups.items()
        ]
        return Repeat(
            tensors, parts, readers=readers, index=self._index, slots=self._slots, lock=self._lock
        )

    def _group(
        self, tensors: Sequence[Tensor]
    ) -> tuple[dict[torch.dtype, list[int]], dict[int, int]]:
        """Put those of a dtype together whose memory is read; tell by which each of them is read.

        What a kernel for several cannot read as it is is by none.
        """
        groups: dict[torch.dtype, list[int]] = {}
        readers: dict[int, int] = {}
        for number, one in enumerate(tensors):
            at, size = _find_plain(one), one.numel()
            if not at or size >= _ALONE:
                continue
            group = groups.setdefault(one.dtype, [])
            last = tensors[group[-1]] if group else None
            if last is not None and last.data_ptr() == at and last.numel() == size:
                readers[number] = group[-1]
            else:
                readers[number] = number
                group.append(number)
        return groups, readers

    def _make_part(self, kind: torch.dtype, group: Sequence[int], sizes: list[int]) -> Part:
        """Write down the launch that reads tensors of one dtype, as it is for them at first."""
        if len(sizes) == 1:
            reading = self._measuring.reading(kind)
            most = self._measuring.most_programs(reading)
            programs = min(-(-sizes[0] // reading.block), most)
            find = functools.partial(self._find_ready, kind)
            return Part(tuple(group), find, programs, (sizes[0],), 0)
        launcher, block, most = self._several.get(kind) or self._make_several(kind)
        ends = apportion(tuple(sizes), block, most)
        missing = TOGETHER - len(sizes)
        numbers = (*sizes, *[0] * missing, *ends)
        find = functools.partial(launcher.ready.get, kind)
        return Part(tuple(group), find, ends[-1], numbers, missing)

    def _find_ready(self, kind: torch.dtype) -> Launch | None:
        """Give what launches the kernel for one plain tensor, if it is compiled."""
        ready = self._ready.get(kind)
        return None if ready is None else ready[:3]

    def _launch(self, kind: torch.dtype, tensors: list[Tensor]) -> int:
        """Measure tensors of one dtype that lie side by side; give the first row."""
        _refuse_recording(tensors[0])
        launcher, block, most = self._several.get(kind) or self._make_several(kind)
        count = len(tensors)
        missing = TOGETHER - count
        sizes = [one.numel() for one in tensors]
        ends = apportion(tuple(sizes), block, most)
        sizes += [0] * missing
        tensors = [*tensors, *tensors[:1] * missing]
        places = [one.data_ptr() for one in tensors]
        with self._lock, self._on_device():
            stream = self._slots.use_stream()
            slot, row = self._slots.reserve(count)
            launcher(
                kind,
                ends[-1],
                stream,
                (*places, *sizes, *ends, *self._slots.places(slot)),
                lambda: (
                    *(self._measuring.see(one) for one in tensors),
                    *sizes,
                    *ends,
                    *self._slots.tensors(slot),
                ),
            )
        return row

    def _make_several(self, kind: torch.dtype) -> tuple[Launcher, int, int]:
        reading = self._measuring.reading(kind)
        constants = reading.constants(is_aligned=True)
        launcher = Launcher(
            kernels.measure_several, warps=reading.warps, MOST=MOST_PROGRAMS, **constants
        )
        made = launcher, reading.block, self._measuring.most_programs(reading)
        self._several[kind] = made
        return made

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
            stream = self._slots.use_stream()
            slot, row = self._slots.reserve(count)
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
                (*kinds, aligned if not all(aligned) else True, max(sizes) >= LARGE),
                count * _UPDATE_SHARES,
                stream,
                (*places, *sizes, *self._slots.places(slot)),
                lambda: (*tensors, *sizes, *self._slots.tensors(slot)),
            )
        return rows

    def find_bad(self) -> dict[int, bool]:
        """Give the rows that have a NaN or a positive infinity, and whether it is a NaN."""
        with self._lock, self._on_device(), undisturbed():
            rows = torch.cat(self._slots.merge())[:, NAN : POSINF + 1]
            is_bad = rows.any(1)
            with _allow_waiting():
                if not is_bad.any().item():  # one number, where all is well
                    return {}
                bad = is_bad.nonzero().flatten()
                return dict(zip(bad.tolist(), (rows[bad, 0] > 0).tolist(), strict=True))

    def take(self) -> Taken:
        """Hand over everything since the last take and start again from row 0."""
        with self._lock, self._on_device(), undisturbed():
            merged = self._slots.take()
            step, self._step = self._step, CudaStep()
            groups = ([one.flatten() for one in merged], step.sketches, step.counts)
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


@functools.lru_cache(maxsize=4096)
def apportion(sizes: tuple[int, ...], block: int, most: int) -> tuple[int, ...]:
    """Share programs among tensors by how large these are; give where those of each end."""
    total = max(sum(sizes), 1)
    ends, end = [], 0
    for size in sizes:
        end += max(1, min(most * size // total, -(-size // block), MOST_PROGRAMS))
        ends.append(end)
    return (*ends, *[end] * (TOGETHER - len(sizes)))


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


def _find_plain(tensor: Tensor) -> int:
    """Give where a tensor lies, if a kernel for several can read it as it is; else 0."""
    if tensor.dtype not in READABLE or not is_direct(tensor):
        return 0
    at = tensor.data_ptr()
    return 0 if at & 15 else at


def _is_simple(update: Update) -> bool:
    """Tell whether a kernel can read an update as it is."""
    before, after, grad = update
    given = (before, after) if grad is None else (before, after, grad)
    return all(
        one.dtype in _UPDATABLE and is_direct(one) and one.shape == before.shape for one in given
    )


def _make_plain(values: Tensor) -> Tensor:
    """Give numbers in a dtype that the kernel of updates reads."""
    with undisturbed():
        if values.dtype is torch.bool:
            return values.view(torch.uint8)
        return values if values.dtype in _UPDATABLE else values.to(torch.float64)


def _simplify(update: Update) -> Update:
    """Give an update as tensors that a kernel can read."""
    before, after, grad = prepare_update(*update)
    return (
        _make_plain(before),
        _make_plain(after),
        None if grad is None else _make_plain(grad),
    )


def _goes_with(update: Update, other: Update) -> bool:
    """Tell whether two updates can be measured in one launch."""
    if not _is_simple(update):
        return False
    kinds = [[None if one is None else one.dtype for one in each] for each in (update, other)]
    return kinds[0] == kinds[1] and max(update[1].numel(), other[1].numel()) < LARGE
