"""Measure how fast tensors are measured on a GPU: `python bench/gpu_kernels.py [--quick]`.

One table for each dtype, from 1 KiB to 4 GiB: the time of the host and of the device, the rate, the
rate of `torch.sum` in the same run, and the physical floor. Prints Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from tables import Table, judge
from torch import Tensor

from hookline.stats import TOGETHER, Log, cuda, open_log

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = [KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB, 4 * GIB]
QUICK_SIZES = [KIB, MIB, 16 * MIB, GIB]
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float64": torch.float64,
    "int8": torch.int8,
}
QUICK_DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]
LEAST_SHARE = 0.85
MOST_HOST = 8.0
_LAUNCHES = 50


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and dtypes")
    options = parser.parse_args()
    sizes = QUICK_SIZES if options.quick else SIZES
    names = QUICK_DTYPES if options.quick else list(DTYPES)
    memory = torch.empty(max(sizes), dtype=torch.uint8, device="cuda")
    log = open_log(memory.device)
    peak = measure_peak(memory)
    print(
        f"{datetime.date.today().isoformat()}, {torch.cuda.get_device_name()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}; "
        f"the fastest read seen: {peak / 1e9:.0f} GB/s.\n"
    )
    for name in names:
        print(measure_dtype(name, memory, sizes, log=log, peak=peak).markdown(), "\n", flush=True)
    print(measure_views(memory, log, peak).markdown(), "\n", flush=True)
    print(measure_host(log).markdown(), flush=True)


def measure_peak(memory: Tensor) -> float:
    """Give the most bytes a second that torch reads of all the memory, in any of three ways."""
    seen = memory.view(torch.float32)
    readers: list[Callable[[], Any]] = [seen.sum, seen.amax, memory.view(torch.bfloat16).sum]
    return max(memory.nbytes / time_device(one, 5) * 1e6 for one in readers)


def measure_dtype(name: str, memory: Tensor, sizes: list[int], *, log: Log, peak: float) -> Table:
    """Measure tensors of one dtype and of several sizes."""
    dtype = DTYPES[name]
    fill(memory, dtype)
    header = ["size", "host us", "device us", "floor us", "GB/s"]
    header += ["torch.sum us", "x torch.sum", "target"]
    table = Table(f"Measuring {name}", header)
    for size in sizes:
        values = memory[:size].view(dtype)
        # It adds up no float8; the same bytes as another dtype are what can be compared.
        summed = memory[:size].view(torch.bfloat16) if dtype.itemsize == 1 else values
        host = time_host(lambda one=values: log.add(one), log)
        device, plain = compare(lambda one=values: log.add(one), summed.sum, log, size)
        share = plain / device
        target = ""
        if size == GIB:
            target = f">= {LEAST_SHARE} {'met' if share >= LEAST_SHARE else 'MISSED'}"
        elif size == KIB:
            target = "host " + judge(host, MOST_HOST)
        row = [describe(size), f"{host:.1f}", f"{device:.1f}", f"{size / peak * 1e6:.1f}"]
        row += [f"{size / device / 1e3:.0f}", f"{plain:.1f}", f"{share:.2f}", target]
        table.rows.append(row)
    table.notes = [
        "A tensor that fits the device's cache is read from there, faster than the floor of its "
        "memory."
    ]
    if dtype.itemsize == 1:
        table.notes.append("*torch.sum* reads the same bytes as bfloat16.")
    return table


def measure_views(memory: Tensor, log: Log, peak: float) -> Table:
    """Measure tensors whose numbers do not lie side by side, as they are and as copies."""
    fill(memory, torch.bfloat16)
    base = memory[:GIB].view(torch.bfloat16)
    views = {
        "transposed": base.view(2**15, 2**14).t(),
        "permuted": base.view(2**10, 2**9, 2**10).permute(2, 0, 1),
        "columns :8192 of 16384": base.view(-1, 2**14)[:, :8192],
        "columns 3:8195 of 16384": base.view(-1, 2**14)[:, 3:8195],
        "columns :512 of 1024": base.view(-1, 1024)[:, :512],
        "columns :64 of 128": base.view(-1, 128)[:, :64],
        "columns :100 of 128": base.view(-1, 128)[:, :100],
        "every other": base[::2],
    }
    header = ["view of 1 GiB of bfloat16", "device us", "floor us", "GB/s", "by a copy us"]
    table = Table("Measuring views", header)
    for name, view in views.items():
        size = view.numel() * 2
        device = time_device(lambda one=view: log.add(one), 5)
        log.take().wait()
        copied = time_device(lambda one=view: log.add(one.contiguous()), 5)
        log.take().wait()
        row = [name, f"{device:.0f}", f"{size / peak * 1e6:.0f}", f"{size / device / 1e3:.0f}"]
        table.rows.append([*row, f"{copied:.0f}"])
    table.notes = ["GB/s counts the numbers of the view alone."]
    return table


def measure_host(log: Log) -> Table:
    """Measure the host's time for small tensors, each another one."""
    table = Table("Small tensors, 1 KiB each, host us a tensor", ["way", "best", "median"])
    tensors = [torch.randn(512, device="cuda").bfloat16() for _ in range(400)]
    views = [torch.randn(16, 32, device="cuda").bfloat16().t() for _ in range(400)]
    columns = [torch.randn(8, 128, device="cuda").bfloat16()[:, :64] for _ in range(400)]

    def one_by_one(given: list[Tensor]) -> None:
        for one in given:
            log.add(one)

    def together(given: list[Tensor]) -> None:
        for start in range(0, len(given), TOGETHER):
            log.add_together(given[start : start + TOGETHER])

    ways: dict[str, tuple[Callable[[list[Tensor]], None], list[Tensor]]] = {
        "one by one": (one_by_one, tensors),
        f"{TOGETHER} together": (together, tensors),
        "transposed, one by one": (one_by_one, views),
        "columns, one by one": (one_by_one, columns),
    }
    for name, (way, given) in ways.items():
        took = []
        for _ in range(12):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            way(given)
            took.append((time.perf_counter() - begun) / len(given) * 1e6)
            log.take().wait()
        took = took[2:]
        table.rows.append([name, f"{min(took):.2f}", f"{statistics.median(took):.2f}"])
    return table


def fill(memory: Tensor, dtype: torch.dtype) -> None:
    """Put random numbers of a dtype into all the memory."""
    values = memory.view(dtype)
    piece = 2**26
    for start in range(0, values.numel(), piece):
        part = values[start : start + piece]
        part.copy_((torch.randn(part.numel(), device="cuda") * 2).to(dtype))


def time_host(call: Callable[[], Any], log: Log) -> float:
    """Give the host's microseconds for one call, while the device has room for more work."""
    took = []
    for _ in range(6):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(20):
            call()
        took.append((time.perf_counter() - begun) / 20 * 1e6)
        log.take().wait()
    return min(took)


def compare(
    measure: Callable[[], Any], add_up: Callable[[], Any], log: Log, size: int
) -> tuple[float, float]:
    """Give the device's microseconds of both, in turns; small ones without the host's part."""
    if size <= 16 * MIB:
        replays = [record(measure), record(add_up)]
        pairs = [[time_device(one, 3) / _LAUNCHES for one in replays] for _ in range(4)]
    else:
        pairs = []
        for _ in range(4):
            pairs.append([time_device(measure, 5), time_device(add_up, 5)])
            log.take().wait()
    log.take().wait()
    return min(one for one, _ in pairs), min(other for _, other in pairs)


def record(call: Callable[[], Any]) -> Callable[[], None]:
    """Record many calls as a CUDA graph: its replay is all the device's time."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # a stream that a log meets first waits, which is not recorded
        call()
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    # A log refuses to be recorded, since replays fill rows of other steps; nobody reads these.
    unseen = mock.patch.object(cuda, "is_capturing_cuda_graph", return_value=False)
    with unseen, torch.cuda.graph(graph, stream=stream):
        for _ in range(_LAUNCHES):
            call()
    replay: Callable[[], None] = graph.replay
    return replay


def time_device(call: Callable[[], Any], count: int) -> float:
    """Give the device's microseconds for one of `count` calls, the best of some turns."""
    call()
    best = float("inf")
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / count * 1000)
    return best


def describe(size: int) -> str:
    """Write a number of bytes in the largest unit."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


if __name__ == "__main__":
    main()
