"""A CUDA device that is not there: its log measures tensors of the CPU by their addresses.

All is as on a GPU but the kernels, which NumPy stands in for, and the tensors: so what the host
does there is tested on any machine. A launch gets what Triton's own gets.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline.stats import TOGETHER, Log
from hookline.watchers import swift_ears, waiting
from hookline.watchers.recording import Recorder

WIDTH = 10
"""Numbers in a row on the device."""

OWN_ARGUMENTS = {"measure": 4, "measure_several": 3 * TOGETHER + 2}
"""How many arguments a kernel has before those it is compiled with."""


class PretendedDevice:
    """What was launched on it, and on which stream work goes to it now."""

    def __init__(self) -> None:
        self.stream = 7
        self.is_idle = False
        """Whether kernels do nothing, so that what leads to them can be timed."""
        self.launches: list[tuple[str, str]] = []
        """The kernel, and whether it went the `usual` way through Triton or the `short` one."""
        self.waits: list[tuple[int, int]] = []
        """Streams that were told to wait, and the stream that each of them waits for."""
        self.open_log: Callable[[], Log]


class _Kernel:
    """Stand for one of Triton's: `kernel[grid](*args)` runs it, and gives what runs it again."""

    def __init__(self, device: PretendedDevice, name: str, run: Callable[..., None]) -> None:
        self.device, self.name, self.run = device, name, run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            self.device.launches.append((self.name, "usual"))
            self.run(args[0].dtype, *map(_to_number, args))
            return SimpleNamespace(
                run=self._make_short(), function=args[0].dtype, packed_metadata=None
            )

        return launch

    def _make_short(self) -> Any:
        def launch(x: int, y: int, z: int, stream: int, kind: torch.dtype, *args: Any) -> None:
            if self.device.is_idle:
                return
            assert stream == self.device.stream
            self.device.launches.append((self.name, "short"))
            before = 8  # what Triton takes besides
            self.run(kind, *args[before : before + OWN_ARGUMENTS[self.name]])

        return SimpleNamespace(
            launch=launch,
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=False,
        )


def _to_number(argument: Tensor | int) -> int:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def _measure(kind: torch.dtype, at: int, count: int, row_at: int, programs_at: int) -> None:
    """Write the row of one tensor, as one program would."""
    raw = (ctypes.c_char * (count * kind.itemsize)).from_address(at)
    x = torch.frombuffer(bytearray(raw.raw), dtype=kind).double().numpy()
    finite = x[np.isfinite(x)]
    row = np.ctypeslib.as_array((ctypes.c_double * WIDTH).from_address(row_at))
    row[:] = 0
    row[:6] = len(finite), *(sum(one) for one in (np.isnan(x), x == np.inf, x == -np.inf)), 0, 0
    row[4:6] = (finite.min(), finite.max()) if len(finite) else (np.inf, -np.inf)
    if len(finite):
        row[6:8] = finite.mean(), np.square(finite - finite.mean()).sum()
    ctypes.c_int32.from_address(programs_at).value = 1


def _measure_several(kind: torch.dtype, *args: int) -> None:
    places, counts, ends = (
        args[begin : begin + TOGETHER] for begin in range(0, 3 * TOGETHER, TOGETHER)
    )
    rows_at, programs_at = args[3 * TOGETHER :]
    slots = importlib.import_module("hookline.stats.slots")
    begin = 0
    for number, (at, count, end) in enumerate(zip(places, counts, ends, strict=True)):
        if end > begin:
            row_at = rows_at + number * slots.SLOT_BYTES
            _measure(kind, at, count, row_at, programs_at + 4 * number)
        begin = end


class _Reduce:
    """Stand for the kernel that merges rows, of which here each tensor has one."""

    def __init__(self, device: PretendedDevice) -> None:
        self.device = device

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(partials: Tensor, programs: Tensor, out: Tensor, **constants: Any) -> None:
            if self.device.is_idle:
                out.zero_()
                return
            assert programs[: len(out)].tolist() == [1] * len(out)
            out.copy_(partials[: len(out), 0])

        return launch


class _Event:
    """Stand on a stream where everything is done at once."""

    def record(self, stream: Any) -> None:
        self.stream = stream.cuda_stream

    def query(self) -> bool:
        return True


class _Stream:
    """Stand for the stream that work goes to now."""

    def __init__(self, device: PretendedDevice) -> None:
        self.device, self.cuda_stream = device, device.stream

    def wait_stream(self, other: _Stream) -> None:
        self.device.waits.append((self.cuda_stream, other.cuda_stream))

    def wait_event(self, event: _Event) -> None:
        self.device.waits.append((self.cuda_stream, event.stream))


@contextmanager
def pretend_device(patch: pytest.MonkeyPatch) -> Iterator[PretendedDevice]:
    """Have the log of a CUDA device measure tensors of the CPU, until the patch is undone."""
    device = PretendedDevice()
    before = set(sys.modules)
    names = ("kernels", "measuring", "launching", "slots", "repeating", "cuda")
    with _triton_there():
        modules = [importlib.import_module(f"hookline.stats.{name}") for name in names]
    kernels, measuring, launching, slots, repeating, cuda = modules
    patch.setattr(kernels, "measure", _Kernel(device, "measure", _measure))
    patch.setattr(kernels, "measure_several", _Kernel(device, "measure_several", _measure_several))
    patch.setattr(kernels, "reduce_rows", _Reduce(device))
    patch.setattr(launching.Launcher, "is_quick", True)
    for module in (slots, repeating, cuda):
        patch.setattr(module, "raw_cuda_stream", lambda index: device.stream)
    for module in (repeating, cuda):
        patch.setattr(module, "current_cuda_device", lambda: -1)  # as tensors of the CPU say
    patch.setattr(cuda, "is_capturing_cuda_graph", lambda tensor: False)
    plain = SimpleNamespace(
        block=4, warps=4, programs=2, constants=lambda is_aligned: {}, see=lambda one: one
    )
    patch.setattr(measuring, "reading_of", lambda kind, capability: plain)
    on_cpu = torch.device("cpu")
    for module in (slots, cuda):
        patch.setattr(module, "torch", _CudaTorch(on_cpu, device))
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    properties = SimpleNamespace(multi_processor_count=4)
    patch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    def open_log() -> Log:
        log = cuda.CudaLog(SimpleNamespace(index=0))
        log._index = -1
        return log

    device.open_log = open_log
    try:
        yield device
    finally:
        if importlib.util.find_spec("triton") is None:  # else nobody could tell how they came there
            for name in set(sys.modules) - before:
                if name.startswith("hookline.stats."):
                    del sys.modules[name]


class _CudaTorch(ModuleType):
    """Torch, whose CUDA devices are the CPU and whose memory is never page-locked."""

    def __init__(self, on_cpu: torch.device, device: PretendedDevice) -> None:
        super().__init__("torch")
        self.device = lambda *place: on_cpu
        self.cuda = SimpleNamespace(
            Event=_Event,
            current_stream=lambda index: _Stream(device),
            get_sync_debug_mode=lambda: 0,
            is_current_stream_capturing=lambda: False,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.empty(*size, **options)


@contextmanager
def _triton_there() -> Iterator[None]:
    """Have Triton, or as much of it as it takes to load kernels; torch sees nothing of that."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit = lambda function=None, **_: function or (lambda other: other)  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    language.constexpr = lambda value: SimpleNamespace(value=value)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton", triton)
        patch.setitem(sys.modules, "triton.language", language)
        yield


def have_values_wait(patch: pytest.MonkeyPatch) -> None:
    """Have a watch let values on the CPU wait for others, as it does those on a GPU."""

    def measure(self: Recorder, site: int, value: Tensor) -> None:
        if self.extras or not self.queue.take(site, value):
            self.measure_now(site, value)

    for module in (waiting, swift_ears):
        patch.setattr(module, "raw_cuda_stream", lambda device: 0)
    patch.setattr(waiting, "current_stream", lambda device: None)
    patch.setattr(Recorder, "measure", measure)
