"""Measure what watching takes of the host beside a GPU: `python bench/gpu_host.py`.

A GPT as deep as that of gpu_watch.py and of next to no width trains: on a GPU its kernels are done
before the host has launched the next ones, so a step takes what the host takes. Where the wide one
takes longer, the device is the limit, and what the host does beside it costs nothing.

Without a GPU it trains on the CPU. Its values go the way of those on a GPU, up to the launch of a
kernel, which does nothing. So all that is added to a step is time of the host, whose share on a GPU
is that of slower steps. What the driver takes for a launch is not in it, nor what autograd's own
thread takes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import Size
from monitors import Monitor, hook_and_ignore
from tables import Table
from trainings import CONTROL, PLAIN, VALUES, Training, bound_median, watch

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from pretended_device import have_values_wait, pretend_device

from hookline.watchers import recording

SIZE = Size(blocks=24, width=16, heads=2, vocabulary=64, length=8, batch=1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALONE = {"rules": False, "replay": False, "units_every": 0}
STEPS = 50
MONITORS = [
    PLAIN,
    CONTROL,
    Monitor("hooks that do nothing", hook_and_ignore),
    Monitor("hl.watch, outputs and gradients", watch(**VALUES, **ALONE)),
    Monitor("hl.watch, every=10", watch(**VALUES, **ALONE, every=10)),
    Monitor("hl.watch, never", watch(**VALUES, **ALONE, every=10**9)),
]


class NarrowTraining(Training):
    """A training that takes the device next to no time, on batches of one length or of several."""

    def __init__(self, lengths: int) -> None:
        size = replace(SIZE, length=SIZE.length + lengths - 1)
        super().__init__(size, device=DEVICE, dtype=torch.bfloat16 if DEVICE == "cuda" else None)
        longest, draw = self.batches[0], random.Random(0).randint
        several = [longest[:, : draw(SIZE.length, size.length) + 1] for _ in range(20 * lengths)]
        self.batches = several if lengths > 1 else self.batches

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Make an optimizer that has not stepped; on the CPU the quickest one."""
        if DEVICE == "cuda":
            return super().make_optimizer()
        return torch.optim.SGD(self.model.parameters(), lr=1e-4)


def main() -> None:
    """Train with each monitor in turn, and print what each adds to a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lengths", type=int, default=1, help="of sequences, drawn by chance")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        begin_measuring = stack.enter_context(pretend()) if DEVICE == "cpu" else lambda: None
        trainings = {one.name: NarrowTraining(options.lengths) for one in MONITORS}
        for monitor in MONITORS:
            training = trainings[monitor.name]
            training.attached = stack.enter_context(monitor.attach(training.model))
        for training in trainings.values():
            for _ in range(40 * options.lengths):
                training.step()
            training.attached.settle()
        begin_measuring()
        print(measure(trainings, options.rounds).markdown())


@contextlib.contextmanager
def pretend() -> Iterator[Callable[[], None]]:
    """Have values of the CPU taken for those of a GPU; give what ends all launching."""
    with pytest.MonkeyPatch.context() as patch, pretend_device(patch) as device:
        have_values_wait(patch)
        patch.setattr(recording, "open_log", lambda where: device.open_log())

        def launch_nothing() -> None:
            device.is_idle = True

        yield launch_nothing


def wait_for_device() -> None:
    """Wait until the device has done all, where there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(trainings: dict[str, NarrowTraining], rounds: int) -> Table:
    """Time steps in a row with each monitor, each round in another order."""
    gc.collect()
    gc.freeze()
    taken: dict[str, list[float]] = {name: [] for name in trainings}
    order = list(trainings)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            training = trainings[name]
            training.step()
            training.attached.settle()
            wait_for_device()
            begin = time.perf_counter()
            for _ in range(STEPS):
                training.step()
            wait_for_device()
            taken[name].append((time.perf_counter() - begin) / STEPS * 1e6)
            training.attached.settle()
    plain = taken[PLAIN.name]
    table = Table(
        f"What a step takes of the host: {trainings[PLAIN.name].describe()}",
        ["monitor", "us", "added us", "95% interval", "x plain"],
    )
    for name, times in taken.items():
        added = [one - other for one, other in zip(times, plain, strict=True)]
        low, high = bound_median(added)
        ratio = statistics.median(one / other for one, other in zip(times, plain, strict=True))
        row = [name, f"{statistics.median(times):.0f}", f"{statistics.median(added):.0f}"]
        table.rows.append([*row, f"{low:.0f} to {high:.0f}", f"{ratio:.3f}"])
    table.notes = [f"Wall time, medians of {rounds} rounds of {STEPS} steps."]
    return table


if __name__ == "__main__":
    main()
