"""What a training step costs while a monitor watches it.

Every monitor has a model and an optimizer to itself, made from one seed. All train in one process,
one step each in a round, each round in another order: on a shared machine that is quieter than
steps in a row. The CPU time of a monitor is the training thread's and its own threads'.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from models import Size, TrainedGPT
from monitors import BY_HAND, Attach, Attached, Monitor, attach_nothing, find_peers
from tables import Table, judge
from timing import Timing
from torch import Tensor, nn

import hookline as hl

SMALL = Size(blocks=12, width=128, heads=4, vocabulary=1000, length=64, batch=8)


def watch(**options: object) -> Attach:
    """Attach `hl.watch` with these options, writing to a folder."""

    @contextlib.contextmanager
    def attach(model: nn.Module) -> Iterator[Attached]:
        with (
            tempfile.TemporaryDirectory() as folder,
            hl.watch(model, folder, **options) as watcher,
        ):
            yield Attached(settle=watcher.flush)

    return attach


PLAIN = Monitor("plain", attach_nothing)
CONTROL = Monitor("plain again (noise)", attach_nothing)
VALUES = {"parameters": None, "sketch_every": 0, "counts_every": 0}
WEIGHTS = VALUES | {"parameters": "**", "moments_every": 0}
WATCHED = [
    Monitor("hl.watch, outputs and gradients", watch(**VALUES), target=1.10),
    Monitor("hl.watch, and a sketch", watch(**VALUES | {"sketch_every": 1}), target=1.15),
    Monitor("hl.watch, and parameters, updates", watch(**WEIGHTS), target=1.25),
    Monitor("hl.watch, every=10", watch(**VALUES, every=10), target=1.02, steps=10),
    Monitor("hl.watch, as it comes", watch(), steps=10),
]


class Training:
    """A model, its optimizer and its batches, the same each time it is made."""

    def __init__(
        self,
        size: Size,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        make_model: Callable[[Size], nn.Module] = TrainedGPT,
    ) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = make_model(size).to(dtype)
        self.is_fused = None if device == "cpu" else True
        self.optimizer = self.make_optimizer()
        shape = (16, size.batch, size.length + 1)
        self.batches = list(torch.randint(0, size.vocabulary, shape).to(device))
        self.around: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self.attached = Attached()
        self.taken = 0

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Make an optimizer that has not stepped."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.is_fused)

    def step(self) -> Tensor:
        """Train on one batch; give the loss."""
        batch = self.batches[self.taken % len(self.batches)]
        self.taken += 1
        self.attached.before_step()
        self.optimizer.zero_grad()
        with self.around:
            output = self.model(batch[:, :-1])
            logits = getattr(output, "logits", output)  # as those of transformers give them
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.attached.after_step()
        return loss.detach()

    def describe(self) -> str:
        """Say how large the model is."""
        parameters = list(self.model.parameters())
        count = sum(one.numel() for one in parameters) / 1e6
        modules = sum(1 for _ in self.model.modules())
        return f"{count:.2f}M parameters in {len(parameters)} tensors, {modules} modules"


class Trial:
    """A training with a monitor attached, and what was measured of it."""

    def __init__(self, monitor: Monitor, stack: contextlib.ExitStack) -> None:
        self.monitor = monitor
        self.training = Training(SMALL)
        self.timing = Timing()
        before = set(threading.enumerate())
        self.training.attached = stack.enter_context(monitor.attach(self.training.model))
        self.losses = [self.training.step().item() for _ in range(4)]
        self.threads = set(threading.enumerate()) - before
        self.in_threads = 0

    def time_step(self) -> None:
        """Time one step."""
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        self.training.step()
        self.timing.cpu.append(time.thread_time_ns() - cpu)
        self.timing.wall.append(time.perf_counter_ns() - wall)

    def read_threads(self) -> int:
        """Give the CPU time that the monitor's threads have had, all they were given being done."""
        self.training.attached.settle()
        clocks = [time.pthread_getcpuclockid(one.ident) for one in self.threads if one.ident]
        return sum(map(time.clock_gettime_ns, clocks))


def measure_watch(rounds: int, with_peers: bool) -> Table:
    """Train a small GPT with every module's output and its gradient measured at every step."""
    header = ["monitor", "CPU ms a step", "x plain median", "95% interval", "min", "in threads"]
    table = Table(
        "watch: a training step, every module's output and its gradient",
        [*header, "wall median", "losses", "target"],
    )
    table.rows = compare([PLAIN, CONTROL, *BY_HAND, *WATCHED], rounds)
    more = ["Peers are measured with --peers."]
    if with_peers:  # apart, and seldom: some take several times as long
        peers, more = find_peers()
        if peers:
            table.rows += compare([PLAIN, *peers], max(10, rounds // 4))[1:]
            more.append(
                "Peers have rounds of their own, with a plain training among them. wandb writes in "
                "a process of its own, whose CPU time is not in the table."
            )
    table.notes = [
        f"GPT of {SMALL.blocks} blocks of width {SMALL.width}, {Training(SMALL).describe()}; "
        f"{SMALL.batch} sequences of {SMALL.length} tokens, AdamW. CPU time is the training "
        "thread's and, where *in threads* is not 0, that of the monitor's own threads. *losses*: "
        "whether the first are those of the plain training, bit for bit.",
        *more,
    ]
    return table


def compare(monitors: Sequence[Monitor], rounds: int) -> list[list[str]]:
    """Train with every monitor in turn; give the table's rows, the first of them the plain one."""
    with contextlib.ExitStack() as stack:
        trials = [Trial(monitor, stack) for monitor in monitors]
        for trial in trials:
            trial.in_threads -= trial.read_threads()
        take_rounds(trials, rounds)
        for trial in trials:
            trial.in_threads += trial.read_threads()
            trial.in_threads //= rounds
    return [describe(trial, trials[0]) for trial in trials]


def take_rounds(trials: Iterable[Trial], rounds: int) -> None:
    """Time one step of every training in each round, each round in another order."""
    order = list(trials)
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.freeze()  # what torch made at import is not searched again while a step is timed
    for _ in range(rounds):
        shuffle(order)
        for trial in order:
            trial.time_step()
    gc.unfreeze()


def describe(trial: Trial, plain: Trial) -> list[str]:
    """Write a row: what a step took, over what plain ones of the same rounds took."""
    steps = trial.monitor.steps
    cpu = [figure + trial.in_threads for figure in gather(trial.timing.cpu, steps)]
    plain_cpu = gather(plain.timing.cpu, steps)
    ratios = [one / other for one, other in zip(cpu, plain_cpu, strict=True)]
    low, high = bound_median(ratios)
    pairs = zip(gather(trial.timing.wall, steps), gather(plain.timing.wall, steps), strict=True)
    median = statistics.median(ratios)
    return [
        trial.monitor.name,
        f"{statistics.median(cpu) / 1e6:.1f}",
        f"{median:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{min(cpu) / min(plain_cpu):.3f}",
        f"{trial.in_threads / statistics.median(plain_cpu):.3f}",
        f"{statistics.median(one / other for one, other in pairs):.3f}",
        "the same" if trial.losses == plain.losses else "OTHERS",
        judge(median, trial.monitor.target),
    ]


def bound_median(figures: list[float]) -> tuple[float, float]:
    """Give bounds that hold the true median nineteen times in twenty, whatever the noise."""
    ordered = sorted(figures)
    reach = 0.98 * math.sqrt(len(ordered))  # of ranks, half of them on either side of the median
    first = max(0, math.floor(len(ordered) / 2 - reach))
    return ordered[first], ordered[len(ordered) - 1 - first]


def gather(figures: list[int], steps: int) -> list[float]:
    """Give the means of so many figures in a row each."""
    return [
        statistics.fmean(figures[start : start + steps])
        for start in range(0, len(figures) - steps + 1, steps)
    ]
