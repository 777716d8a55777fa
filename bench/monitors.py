"""What people attach to a model that trains: hooks by hand, and other tools.

The packages are imported only when asked for; none reaches a network, and what they write goes to
a temporary folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def do_nothing() -> None:
    """Stand where a monitor asks for no call."""


@dataclass(frozen=True, slots=True)
class Attached:
    """What the training loop calls for a monitor."""

    before_step: Callable[[], Any] = do_nothing
    """Called before each step, and timed with it."""

    after_step: Callable[[], Any] = do_nothing
    """Called after each step, and timed with it."""

    settle: Callable[[], Any] = do_nothing
    """Waits until what other threads still do for the steps so far is done."""


Attach = Callable[[nn.Module], AbstractContextManager[Attached]]


@dataclass(frozen=True, slots=True)
class Monitor:
    """One thing to attach, and what it may cost."""

    name: str
    """How the table calls it."""

    attach: Attach
    """Attaches it to a model until the block ends."""

    target: float | None = None
    """The most that a step may take, over a plain one."""

    steps: int = 1
    """How many steps make one figure: as many as it needs to do all that it does."""


@contextlib.contextmanager
def attach_nothing(model: nn.Module) -> Iterator[Attached]:
    """Train without a monitor."""
    yield Attached()


@contextlib.contextmanager
def hook_values(model: nn.Module, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `see` with the output of every module, and with its gradient."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        see(output.detach())
        output.register_hook(see)

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def hook_and_ignore(model: nn.Module) -> Iterator[Attached]:
    """Attach hooks that do nothing: what any monitor pays."""
    with hook_values(model, lambda value: None):
        yield Attached()


@contextlib.contextmanager
def hook_naively(model: nn.Module) -> Iterator[Attached]:
    """Compute what people ask for with the functions of that name, and read each at once."""
    seen: list[tuple[float, float, float, float]] = []

    def see(value: Tensor) -> None:
        mean, std = value.mean().item(), value.std().item()
        absmax, nans = value.abs().max().item(), value.isnan().sum().item()
        seen.append((mean, std, absmax, nans))

    with hook_values(model, see):
        yield Attached(after_step=seen.clear)


@contextlib.contextmanager
def hook_and_sum(model: nn.Module) -> Iterator[Attached]:
    """Read every value once more, and copy one number of each at the end of a step."""
    rows = Rows()
    with hook_values(model, lambda value: rows.pending.append(value.sum())):
        yield Attached(after_step=rows.copy)


@contextlib.contextmanager
def hook_by_hand(model: nn.Module, *, sketch: bool = False) -> Iterator[Attached]:
    """Measure with the cheapest functions of torch; one copy to the host a step.

    Mean, rms and absmax follow from these; something is not finite only if the sum is not.
    """
    rows, sketches, signs = Rows(), Rows(), Signs()

    def see(value: Tensor) -> None:
        rows.pending += torch.aminmax(value)
        rows.pending += value.sum(), torch.linalg.vector_norm(value)
        if sketch:
            matrix = value.reshape(-1, SKETCH)
            sketches.pending.append(torch.mv(matrix.t(), signs.of(matrix)))

    def copy() -> None:
        rows.copy()
        if sketch:
            sketches.copy()

    with hook_values(model, see):
        yield Attached(after_step=copy)


class Rows:
    """Small tensors of one step, copied to the host together."""

    def __init__(self) -> None:
        self.pending: list[Tensor] = []
        self.copied: Tensor | None = None

    def copy(self) -> None:
        """Copy what is pending and begin again; the copy of the last step is read by then."""
        self.copied = torch.stack(self.pending).to("cpu", non_blocking=True)
        self.pending.clear()


SKETCH = 64


class Signs:
    """Random signs, made once for each number of rows."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def of(self, matrix: Tensor) -> Tensor:
        """Give one sign for each row."""
        signs = self._kept.get(len(matrix))
        if signs is None:
            generator = torch.Generator().manual_seed(len(matrix))
            signs = torch.randint(0, 2, (len(matrix),), generator=generator) * 2 - 1
            signs = self._kept[len(matrix)] = signs.to(matrix)
        return signs


BY_HAND = [
    Monitor("hooks that do nothing", hook_and_ignore),
    Monitor("hand: mean, std, absmax, NaNs, .item()", hook_naively),
    Monitor("hand: aminmax, sum, L2, one copy", hook_by_hand),
    Monitor("hand: the same and a sketch", lambda model: hook_by_hand(model, sketch=True)),
]


def find_peers() -> tuple[list[Monitor], list[str]]:
    """List the tools that are installed, and a line for each that is not."""
    peers = {
        "wandb": Monitor('wandb.watch(log="all", log_freq=1), offline', attach_wandb),
        "tensorboard": Monitor("TensorBoard, add_histogram", attach_tensorboard),
        "msprobe": Monitor("msprobe, L0 statistics", attach_msprobe),
    }
    is_there = {name: importlib.util.find_spec(name) is not None for name in peers}
    missing = [f"{name} is not installed here: left out." for name in peers if not is_there[name]]
    return [peer for name, peer in peers.items() if is_there[name]], missing


@contextlib.contextmanager
def attach_wandb(model: nn.Module) -> Iterator[Attached]:
    """Log a histogram of each parameter and of its gradient, as `wandb.watch` does."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Read when it is imported, which must be after this.
        os.environ |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
        os.environ |= {f"WANDB_{name}_DIR": folder for name in ("CACHE", "CONFIG", "DATA")}
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, x_disable_stats=True
        )
        run = wandb.init(project="bench", mode="offline", dir=folder, settings=settings)
        run.watch(model, log="all", log_freq=1)
        try:
            # What the hooks logged belongs to no step until something is committed.
            yield Attached(after_step=lambda: run.log({"step": 1}))
        finally:
            run.finish()


@contextlib.contextmanager
def attach_tensorboard(model: nn.Module) -> Iterator[Attached]:
    """Write a histogram of each parameter and of its gradient."""
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        step = 0

        def write() -> None:
            nonlocal step
            for name, parameter in model.named_parameters():
                writer.add_histogram(name, parameter, step)
                writer.add_histogram(f"{name}.grad", parameter.grad, step)
            step += 1

        yield Attached(after_step=write, settle=writer.flush)


@contextlib.contextmanager
def attach_msprobe(model: nn.Module) -> Iterator[Attached]:
    """Dump statistics of what every module takes and gives, forward and backward."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),  # it prints four lines a step
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        from msprobe.pytorch import PrecisionDebugger

        config = Path(folder, "config.json")
        statistics = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
        asked: dict[str, Any] = {"task": "statistics", "level": "L0", "rank": [], "step": []}
        asked |= {"dump_path": str(Path(folder, "dump")), "statistics": statistics}
        config.write_text(json.dumps(asked), encoding="utf-8")
        debugger = PrecisionDebugger(config_path=str(config))

        def end() -> None:
            debugger.stop()
            debugger.step()

        yield Attached(before_step=lambda: debugger.start(model=model), after_step=end)
