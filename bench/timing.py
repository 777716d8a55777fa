"""Measure variants of one job against each other, on a machine that other work shares.

All variants of a group run in one process. They are warmed, then measured in many rounds, each in
another order; a variant's figure of a round is the best of a few calls. Ratios are made twice:
from the best of all rounds, and as the median of the ratios within each round, which noise that
comes and goes does not move. Thread CPU time does not count the time others had the core.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do the job that a group measures."""

    name: str
    """How the table calls it."""

    call: Callable[[], Any]
    """What is timed."""

    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """What is open while it runs and not timed: hooks that stay, say."""

    base: str = "plain"
    """The variant without hooks that it is compared with."""

    against: str | None = None
    """The variant that a target compares it with."""

    target: float | None = None
    """The most that the ratio to `against` should be."""


@dataclass(slots=True)
class Timing:
    """What was measured of one variant: nanoseconds, one figure for each round."""

    wall: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)

    def best(self) -> float:
        """Give the least CPU time in microseconds."""
        return min(self.cpu) / 1000


@dataclass(frozen=True, slots=True)
class Ratio:
    """How two variants compare in CPU time and wall time."""

    best: float
    """The best of all rounds over the best of all rounds, CPU time."""

    median: float
    """The median of the ratios within each round, CPU time."""

    wall: float
    """The same median in wall time."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The timings of a group."""

    variants: list[Variant]
    timings: dict[str, Timing]

    def ratio(self, name: str, reference: str) -> Ratio:
        """Compare one variant with another."""
        one, other = self.timings[name], self.timings[reference]
        return Ratio(
            min(one.cpu) / min(other.cpu),
            _median_ratio(one.cpu, other.cpu),
            _median_ratio(one.wall, other.wall),
        )

    def overhead(self, name: str, reference: str) -> float:
        """Give the microseconds of CPU time that a variant adds: the median over the rounds."""
        pairs = zip(self.timings[name].cpu, self.timings[reference].cpu, strict=True)
        return statistics.median((a - b) / 1000 for a, b in pairs)


def _median_ratio(one: list[int], other: list[int]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def measure(variants: list[Variant], *, rounds: int, calls: int = 4) -> Measurement:
    """Run every variant `calls` times in each of `rounds` rounds."""
    timings = {variant.name: Timing() for variant in variants}
    for variant in variants:
        with variant.around():
            for _ in range(5):
                variant.call()
    gc.collect()
    gc.freeze()  # what torch made at import is not searched again while a variant is timed
    order = list(variants)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for variant in order:
            wall, cpu = _time(variant, calls)
            timings[variant.name].wall.append(wall)
            timings[variant.name].cpu.append(cpu)
    gc.unfreeze()
    return Measurement(variants, timings)


def _time(variant: Variant, calls: int) -> tuple[int, int]:
    walls, cpus = [], []
    call = variant.call
    with variant.around():
        call()
        for _ in range(calls):
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            call()
            cpus.append(time.thread_time_ns() - cpu)
            walls.append(time.perf_counter_ns() - wall)
    return min(walls), min(cpus)
