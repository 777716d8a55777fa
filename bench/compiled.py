"""What watching costs in a compiled training: its steps, and compiling it.

One training serves all ways to watch: a watch is open for its own steps and closed again, so the
rounds also show whether going from the watched graph to the plain one and back compiles anything.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from models import Size
from monitors import Attach, attach_nothing
from tables import Table, judge
from torch import Tensor
from torch._inductor.utils import fresh_cache
from trainings import VALUES, Training, bound_median, watch

SIZE = Size(blocks=4, width=256, heads=4, vocabulary=1000, length=128, batch=8)
LOSSES = 4
"""How many first losses of the watched training are compared with those of the plain one."""

COMPILING = 1.3
"""The most that compiling a watched training should take, in that of a plain one."""

SPARING = VALUES | {"units_every": 0, "moments_every": 0, "rules": False, "updates": False}
"""Every module's output and its gradient, and nothing that comes with some steps alone."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the steps of a training."""

    name: str
    """How the table calls it."""

    attach: Attach = attach_nothing
    """What is open for its steps."""

    before: int = 2
    """How many steps are taken before those that are timed."""

    target: float | None = None
    """The most that its steps should take, in plain ones."""


def make_ways(every_step: float, one_in_ten: float) -> list[Way]:
    """Name the ways, with the targets of two of them."""
    return [
        Way("plain"),
        Way("plain again (noise)"),
        Way("hl.watch, every step", watch(**SPARING), target=every_step),
        Way("hl.watch, every=10", watch(**SPARING, every=10), target=one_in_ten),
        Way("hl.watch, as it comes", watch(parameters=None, updates=False), before=40),
    ]


@dataclass(frozen=True, slots=True)
class Compiling:
    """What the first step of a training took."""

    wall: float
    """Seconds until the first step was done."""

    cpu: float
    """Seconds of CPU time, those of processes that were waited for with them."""

    losses: list[float]
    """The first losses."""


Figures = tuple[float, ...]
"""What was measured of a few steps in a row: milliseconds a step, by several clocks."""


def compile_model(training: Training, mode: str) -> None:
    """Have a training's model compiled into one graph, or not at all."""
    torch._dynamo.reset()
    if mode != "eager":
        training.model.compile(fullgraph=True, mode=None if mode == "default" else mode)


def compare_compiling(
    training: Training, ways: Sequence[Way], times: int = 1
) -> list[list[Compiling]]:
    """Take the first steps each way, from the same start, compiled by nothing kept from before.

    Gives what that took each time, for each way.
    """
    start = {name: value.clone() for name, value in training.model.state_dict().items()}
    taken: list[list[Compiling]] = [[] for _ in ways]
    for _ in range(times):
        for way, those in zip(ways, taken, strict=True):
            training.model.load_state_dict(start)
            training.optimizer, training.taken = training.make_optimizer(), 0
            torch._dynamo.reset()
            gc.collect()  # what was compiled before would be searched while the next one is
            with way.attach(training.model):
                those.append(time_compiling(training))
    return taken


def time_compiling(training: Training) -> Compiling:
    """Take the first steps of a training."""
    alone = torch._inductor.config.patch(force_disable_caches=True)
    # A folder of its own: many kernels of a watched graph are those of the plain one.
    with alone, fresh_cache():
        wall, cpu = time.perf_counter(), sum(os.times()[:4])
        losses = [training.step().item()]
        wall, cpu = time.perf_counter() - wall, sum(os.times()[:4]) - cpu
        losses += [training.step().item() for _ in range(LOSSES - 1)]
    return Compiling(wall, cpu, losses)


def take_turns(
    training: Training,
    ways: Sequence[Way],
    *,
    rounds: int,
    measure: Callable[[Training], Figures],
) -> tuple[dict[str, list[Figures]], int]:
    """Measure steps of every way in each round, each round in another order.

    Gives with them how many graphs were compiled once every way had had its first turn.
    """
    figures: dict[str, list[Figures]] = {way.name: [] for way in ways}
    order = list(ways)
    shuffle = random.Random(0).shuffle
    for way in ways:
        with open_way(training, way):
            measure(training)
    graphs = count_graphs()
    gc.collect()
    gc.freeze()  # what was made so far is not searched again while steps are timed
    for _ in range(rounds):
        shuffle(order)
        for way in order:
            with open_way(training, way):
                figures[way.name].append(measure(training))
    gc.unfreeze()
    return figures, count_graphs() - graphs


@contextlib.contextmanager
def open_way(training: Training, way: Way) -> Iterator[None]:
    """Attach what a way is, and take the steps that are not timed."""
    with way.attach(training.model) as training.attached:
        for _ in range(way.before):
            training.step()
        training.attached.settle()
        yield
    training.attached = type(training.attached)()


def count_graphs() -> int:
    """Tell how many graphs the compiler has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compare_figures(
    ways: Sequence[Way], figures: dict[str, list[Figures]], clock: int = 0
) -> list[list[str]]:
    """Write a row for each way: what a step took, over plain ones of the same rounds."""
    rows = []
    plain = figures[ways[0].name]
    for way in ways:
        taken = figures[way.name]
        ratios = [one[clock] / other[clock] for one, other in zip(taken, plain, strict=True)]
        low, high = bound_median(ratios)
        medians = [statistics.median(column) for column in zip(*taken, strict=True)]
        row = [way.name, *(f"{one:.2f}" for one in medians)]
        row += [f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}"]
        rows.append([*row, judge(statistics.median(ratios), way.target)])
    return rows


def describe_compiling(
    plain: Sequence[Compiling],
    watched: Sequence[Compiling],
    *,
    graphs: int,
    by: Literal["wall", "cpu"],
) -> str:
    """Say what compiling took, and whether the losses are the same and nothing was compiled."""
    wall, wall_ratio = compare_clocks(plain, watched, "wall")
    cpu, cpu_ratio = compare_clocks(plain, watched, "cpu")
    first_losses = [one.losses for one in (*plain, *watched)]
    same = [len(set(those)) == 1 for those in zip(*first_losses, strict=True)]
    first = "all are" if all(same) else f"{same.index(False)} are"
    return (
        f"The first step took {wall}, in CPU time {cpu}; of the {by} "
        f"{judge(wall_ratio if by == 'wall' else cpu_ratio, COMPILING)}. Of the first {LOSSES} "
        f"losses {first} the same to the last bit. Graphs compiled in the rounds: {graphs}."
    )


def compare_clocks(
    plain: Sequence[Compiling], watched: Sequence[Compiling], clock: str
) -> tuple[str, float]:
    """Say what compiling took each time by one clock, and how often the one goes into the other."""
    first, second = ([getattr(one, clock) for one in way] for way in (plain, watched))
    ratio = statistics.median(map(operator.truediv, second, first))
    texts = (", ".join(f"{one:.1f}" for one in way) for way in (first, second))
    return "{} s plain, {} s watched".format(*texts) + f" ({ratio:.2f} times)", ratio


def measure_compiled(rounds: int) -> Table:
    """Train a small GPT, compiled by inductor for the CPU, with and without a watch."""
    import torch._inductor.config as inductor

    ways = make_ways(every_step=1.2, one_in_ten=1.02)
    with inductor.patch(compile_threads=1):  # so that the CPU time of all of it is known
        warm_up("cpu")
        training = Training(SIZE)
        compile_model(training, "default")
        plain, watched = compare_compiling(training, [ways[0], ways[2]])
        figures, graphs = take_turns(training, ways, rounds=rounds, measure=time_on_cpu)
    header = ["way", "CPU ms a step", "wall ms", "CPU x plain", "95% interval", "target"]
    table = Table("compiled: a training step in one graph, on the CPU", header)
    table.rows = compare_figures(ways, figures)
    table.notes = [
        f"GPT of {SIZE.blocks} blocks of width {SIZE.width}, {training.describe()}; {SIZE.batch} "
        f"sequences of {SIZE.length} tokens, AdamW, `fullgraph=True`, inductor. CPU time is that "
        f"of all threads; medians of {rounds} rounds.",
        describe_compiling(plain, watched, graphs=graphs, by="cpu"),
    ]
    torch._dynamo.reset()
    return table


def warm_up(device: str) -> None:
    """Compile something small, so that what is loaded once is not counted."""
    small = torch.nn.Linear(4, 4, device=device)

    def call(x: Tensor) -> Tensor:
        return small(x).tanh().sum()

    torch.compile(call, fullgraph=True)(torch.ones(2, 4, device=device)).backward()


def time_on_cpu(training: Training, steps: int = 10) -> Figures:
    """Time steps by the CPU time of the whole process and by the wall."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        training.step()
    training.attached.settle()
    cpu = time.process_time() - cpu
    return cpu / steps * 1000, (time.perf_counter() - wall) / steps * 1000
