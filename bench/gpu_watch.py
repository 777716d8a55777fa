"""Measure what watching a training costs on a GPU: `python bench/gpu_watch.py [--autocast] ...`.

Three tables: the time of a step with each monitor, the host's waits for the device inside one
step, and how fast the measuring kernel reads. Nothing waits for the device but the end of a turn.
`--tiny` runs everything on whatever there is, to see that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import Size
from monitors import Monitor, hook_and_ignore, hook_and_sum, hook_by_hand, hook_naively
from tables import Table, judge
from torch.profiler import ProfilerActivity, profile, record_function
from trainings import CONTROL, PLAIN, VALUES, WEIGHTS, Training, bound_median, watch

from hookline.stats import Extras, open_log

LARGE = Size(blocks=24, width=1024, heads=16, vocabulary=32000, length=1024, batch=8)
TINY = Size(blocks=2, width=64, heads=4, vocabulary=100, length=16, batch=2)

MONITORS = [
    PLAIN,
    CONTROL,
    Monitor("hooks that do nothing", hook_and_ignore),
    Monitor("hand: sum, one copy", hook_and_sum),
    Monitor("hand: aminmax, sum, L2, one copy", hook_by_hand),
    Monitor("hand: mean, std, absmax, NaNs, .item()", hook_naively),
]
ALONE = {"rules": False, "replay": False, "units_every": 0}
WATCHED = [
    Monitor("hl.watch, outputs and gradients", watch(**VALUES, **ALONE), target=1.10),
    Monitor("hl.watch, every=10", watch(**VALUES, **ALONE, every=10), target=1.02),
    Monitor("hl.watch, and judged", watch(**VALUES)),
    Monitor("hl.watch, and a sketch", watch(**VALUES | {"sketch_every": 1}, **ALONE)),
    Monitor("hl.watch, and parameters, updates", watch(**WEIGHTS, **ALONE)),
    Monitor("hl.watch, as it comes", watch()),
]
QUICK = ("again", "nothing", "outputs", "every", "judged")
"""What `--quick` measures, by parts of the names."""


@dataclass(slots=True)
class Turns:
    """What the turns of one training took: milliseconds a step, one figure for each turn."""

    device: list[float] = field(default_factory=list)
    """Between two events on the stream."""

    wall: list[float] = field(default_factory=list)
    """Until the device has done all."""

    host: list[float] = field(default_factory=list)
    """Until the host has given out the work: where this is near `wall`, the host is the limit.

    It is not what the host takes: the driver holds it back when it is some thousand launches ahead.
    What it takes by itself is what gpu_host.py measures.
    """


class Stopwatch:
    """Times steps in a row, on the device where there is one."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def time(self, call: Callable[[], Any], times: int) -> tuple[float, float, float]:
        """Give the milliseconds of one call on the device, by the wall and on the host."""
        self.wait()
        begin = time.perf_counter()
        if self.is_cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
        for _ in range(times):
            call()
        if self.is_cuda:
            last.record()
        host = time.perf_counter() - begin
        self.wait()
        wall = time.perf_counter() - begin
        device = first.elapsed_time(last) / 1000 if self.is_cuda else wall
        return device / times * 1000, wall / times * 1000, host / times * 1000


def main() -> None:
    """Measure what was asked for, and print each table as it is ready."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--autocast", action="store_true", help="float32 parameters, autocast")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, also without a GPU")
    parser.add_argument(
        "--only", default="", help="monitors whose name has one of these, beside plain: a,b"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="steps in a row in a round; tens")
    parser.add_argument(
        "--warm", type=int, default=40, help="steps before: in the first 40 channels are looked at"
    )
    parser.add_argument("--quick", action="store_true", help="under a minute: the targets alone")
    options = parser.parse_args()
    if options.quick:
        options.only, options.rounds = options.only or ",".join(QUICK), min(options.rounds, 6)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("there is no GPU here; --tiny runs without one")
    size = TINY if options.tiny else LARGE
    monitors = [*MONITORS, *WATCHED]
    wanted = options.only.split(",")
    monitors = [PLAIN, *(m for m in monitors[1:] if any(text in m.name for text in wanted))]
    print(f"{name_device(device)}, torch {torch.__version__}\n")
    with contextlib.ExitStack() as stack:
        trainings: dict[str, Training] = {}
        for monitor in monitors:
            trainings[monitor.name] = make_training(size, device, options.autocast)
            attach = monitor.attach(trainings[monitor.name].model)
            trainings[monitor.name].attached = stack.enter_context(attach)
        stopwatch = Stopwatch(device)
        print(measure_steps(monitors, trainings, options, stopwatch).markdown(), end="\n\n")
        print(count_waits(trainings, stopwatch).markdown(), end="\n\n", flush=True)
    if not options.quick:
        count = 2**14 if options.tiny else 2**29
        print(measure_reading(count, device, stopwatch).markdown())


def name_device(device: str) -> str:
    """Name the GPU, or say that there is none."""
    return torch.cuda.get_device_name() if device == "cuda" else "no GPU"


def make_training(size: Size, device: str, with_autocast: bool) -> Training:
    """Make a training in bfloat16: of all parameters, or of the operations under autocast."""
    if not with_autocast:
        return Training(size, device=device, dtype=torch.bfloat16)
    training = Training(size, device=device)
    training.around = torch.autocast(device, torch.bfloat16)
    return training


def measure_steps(
    monitors: list[Monitor],
    trainings: dict[str, Training],
    options: argparse.Namespace,
    stopwatch: Stopwatch,
) -> Table:
    """Train with every monitor in turn, and compare steps with plain ones of the same round."""
    # The backward pass of fused attention adds up in any order unless it is told not to.
    torch.use_deterministic_algorithms(True, warn_only=True)
    losses = {
        name: torch.stack([one.step() for _ in range(4)]).tolist()
        for name, one in trainings.items()
    }
    torch.use_deterministic_algorithms(False)
    for training in trainings.values():
        for _ in range(options.warm):
            training.step()
    gc.collect()
    gc.freeze()  # what was made so far is not searched again while steps are timed
    turns = {name: Turns() for name in trainings}
    order = list(trainings)
    shuffle = random.Random(0).shuffle
    for _ in range(options.rounds):
        shuffle(order)
        for name in order:
            training, taken = trainings[name], turns[name]
            training.step()
            training.attached.settle()
            device, wall, host = stopwatch.time(training.step, options.steps)
            training.attached.settle()
            taken.device.append(device)
            taken.wall.append(wall)
            taken.host.append(host)
    described = next(iter(trainings.values())).describe()
    kind = "float32 with bfloat16 autocast" if options.autocast else "bfloat16"
    header = ["monitor", "device ms", "host ms", "device x plain", "95% interval", "wall x plain"]
    table = Table(f"A training step: {described}, {kind}", [*header, "losses", "target"])
    plain = turns[PLAIN.name]
    for monitor in monitors:
        taken = turns[monitor.name]
        ratios = [one / other for one, other in zip(taken.device, plain.device, strict=True)]
        walls = [one / other for one, other in zip(taken.wall, plain.wall, strict=True)]
        low, high = bound_median(ratios)
        figures = [statistics.median(taken.device), statistics.median(taken.host)]
        row = [monitor.name, *(f"{one:.2f}" for one in figures)]
        row += [f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}"]
        row += [f"{statistics.median(walls):.3f}"]
        row += ["the same" if losses[monitor.name] == losses[PLAIN.name] else "OTHERS"]
        table.rows.append([*row, judge(statistics.median(ratios), monitor.target)])
    table.notes = [
        f"Medians of {options.rounds} rounds of {options.steps} steps. *losses*: whether the first "
        "are those of the plain training, bit for bit."
    ]
    return table


STEP = "one watched step"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def count_waits(trainings: dict[str, Training], stopwatch: Stopwatch) -> Table:
    """Count what makes the host wait in one step, as the profiler and as torch itself see it."""
    header = ["monitor", "waits, training threads", "waits, others", "copies to the host"]
    header += ["torch's own check", "device busy ms", "kernels"]
    table = Table("Host synchronisation in one step, and what the device does", header)
    for name, training in trainings.items():
        training.step()
        training.attached.settle()
        stopwatch.wait()
        waits = profile_step(training, stopwatch)
        row = [name, str(waits["training"]), str(waits["others"]), describe_copies(waits)]
        row.append(check_step(training) if stopwatch.is_cuda else "no GPU")
        table.rows.append([*row, f"{waits['busy ns'] / 1e6:.2f}", str(waits["kernels"])])
        stopwatch.wait()
    table.notes = [
        "Training threads are the one that trains and autograd's; a copy to pageable memory waits "
        f"too. Counted are {', '.join(WAITS)} and memory copies from the device."
    ]
    return table


def profile_step(training: Training, stopwatch: Stopwatch) -> Counter[str]:
    """Profile one step; count waits by thread and copies by where they go."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if stopwatch.is_cuda else [])]
    with profile(activities=kinds) as profiled:
        with record_function(STEP):
            training.step()
        training.attached.settle()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return count_events(events, threading.get_native_id())


def count_events(events: list[dict[str, Any]], trainer: int) -> Counter[str]:
    """Count the waits and the copies to the host among a trace's events."""
    backward = "autograd::engine::evaluate_function"
    training = {trainer}
    training |= {one["tid"] for one in events if one.get("name", "").startswith(backward)}
    # The profiler waits for the device when it ends, so a training thread's count ends before.
    step = next(one for one in events if one.get("name") == STEP and one["tid"] == trainer)
    end = step["ts"] + step["dur"]
    counts: Counter[str] = Counter()
    for event in events:
        name = event.get("name", "")
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and name in WAITS:
            if event["tid"] not in training:
                counts["others"] += 1
            elif event["ts"] <= end:
                counts["training"] += 1
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            counts["busy ns"] += int(1000 * event["dur"])
            counts["kernels"] += event["cat"] == "kernel"
        if name.startswith("Memcpy DtoH"):
            counts[name.removeprefix("Memcpy DtoH ")] += 1
    return counts


def describe_copies(waits: Counter[str]) -> str:
    """List the copies to the host by where they go."""
    copies = {name: count for name, count in waits.items() if name.startswith("(")}
    return ", ".join(f"{count} {name}" for name, count in copies.items()) or "0"


def check_step(training: Training) -> str:
    """Let torch raise at the first wait that it knows of."""
    try:
        with raise_at_waits():
            training.step()
    except RuntimeError as error:
        return f"waits: {str(error).splitlines()[0][:60]}"
    return "no wait"


@contextlib.contextmanager
def raise_at_waits() -> Iterator[None]:
    """Make calls that wait for the device raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def measure_reading(count: int, device: str, stopwatch: Stopwatch) -> Table:
    """Compare the bytes a second that `torch.sum` and the measuring kernel read."""
    values = torch.randn(count, device=device, dtype=torch.bfloat16)
    log = open_log(values.device)
    readers: dict[str, Callable[[], Any]] = {
        "torch.sum": values.sum,
        "hookline": lambda: log.add(values),
        "hookline, and a sketch": lambda: log.add(values, Extras.SKETCH),
        "hookline, and counts": lambda: log.add(values, Extras.COUNTS),
    }
    figures: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(11):
        for name, read in readers.items():
            took, _, _ = stopwatch.time(read, 10)
            figures[name] += [took] if turn else []  # a first turn compiles
            log.take().wait()
    header = ["reader", "us", "TB/s", "x torch.sum", "target"]
    table = Table(f"Reading {values.nbytes / 2**20:.3g} MiB of bfloat16", header)
    best = {name: min(times) for name, times in figures.items()}
    for name, milliseconds in best.items():
        share = best["torch.sum"] / milliseconds
        row = [name, f"{milliseconds * 1000:.0f}", f"{values.nbytes / milliseconds / 1e9:.2f}"]
        mark = f">= 0.8 {'met' if share >= 0.8 else 'MISSED'}" if name == "hookline" else ""
        table.rows.append([*row, f"{share:.2f}", mark])
    return table


if __name__ == "__main__":
    main()
