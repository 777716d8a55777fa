"""Train a model compiled, with a watch and without, and its eager twin; compare all three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from small_models import is_clean
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from trainings import Loop, assert_same, finish

import hookline as hl

SPARING: dict[str, Any] = {"sketch_every": 2, "counts_every": 2, "moments_every": 2}


class Block(nn.Module):
    """A part with a residual, a norm and an activation that may be in place."""

    def __init__(self, width: int = 6, *, inplace: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=inplace)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    """A few blocks between two layers."""

    def __init__(self, blocks: int = 1, *, inplace: bool = False) -> None:
        super().__init__()
        self.start = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Block(inplace=inplace) for _ in range(blocks))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twins(NamedTuple):
    """What three trainings gave."""

    eager: hl.Watch
    compiled: hl.Watch
    graphs: int
    """How many graphs were compiled with the watch."""
    plain_graphs: int
    """How many without."""


Compile = Callable[[nn.Module, Any], Callable[..., Any]]
"""Compile a model with a backend; give what is called in its place."""


def wrap(model: nn.Module, backend: Any) -> Callable[..., Any]:
    """Compile as `torch.compile(model)` does."""
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: Any) -> Callable[..., Any]:
    """Compile as `model.compile()` does."""
    model.compile(backend=backend, fullgraph=True)
    return model


def in_parts(model: nn.Module, backend: Any) -> Callable[..., Any]:
    """Compile each block by itself."""
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def as_function(model: nn.Module, backend: Any) -> Callable[..., Any]:
    """Compile a function that calls the model."""
    return torch.compile(lambda *args: model(*args), backend=backend, fullgraph=True)


def train_twins(
    make_model: Callable[[], nn.Module],
    loop: Loop,
    compile: Compile = wrap,
    *,
    backend: str = "aot_eager",
    is_later: bool = False,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> Twins:
    """Train three times; the compiled two must be the same to the last bit."""
    options = {**SPARING, **options}
    watches, outcomes, graphs = [], [], []
    for is_compiled, is_watched in ((False, True), (True, False), (True, True)):
        torch._dynamo.reset()
        counters.clear()
        counter = CompileCounterWithBackend(backend)
        torch.manual_seed(0)
        model = make_model()
        make = make_optimizer or (lambda params: torch.optim.AdamW(params, lr=0.01))
        optimizer = make(model.parameters())
        torch.manual_seed(1)

        def called(model: nn.Module = model, counter: Any = counter) -> Any:
            return compile(model, counter)

        if not is_watched:
            outcomes.append(finish(loop(called(), optimizer), model, optimizer))
            graphs.append(counter.frame_count)
            continue
        call: Any = called() if is_compiled and not is_later else model
        with hl.watch(call if isinstance(call, nn.Module) else model, **options) as watched:
            if is_compiled and is_later:
                call = called()
            outcome = finish(loop(call, optimizer), model, optimizer)
        watches.append(watched)
        assert is_clean(model)
        assert "forward" not in vars(model)
        if is_compiled:
            outcomes.append(outcome)
            graphs.append(counter.frame_count)
    assert_same(*outcomes)
    torch._dynamo.reset()
    return Twins(*watches, graphs=graphs[1], plain_graphs=graphs[0])


STATS = ("count", "rms", "mean", "std", "absmax", "nan", "inf")


def assert_same_rows(
    eager: hl.Watch, compiled: hl.Watch, *, without: tuple[str, ...] = (), rel: float = 1e-5
) -> None:
    """Require the same sites, and at each step the same numbers up to rounding."""
    left, right = eager.history, compiled.history
    assert left.steps.tolist() == right.steps.tolist()
    own, other = ({str(row["site"]) for row in each.sites()} for each in (left, right))
    assert own - set(without) == other
    for address in sorted(other):
        for stat in STATS:
            first = left.series(address, stat).values
            second = right.series(address, stat).values
            np.testing.assert_allclose(
                second, first, rtol=rel, atol=1e-7, err_msg=f"{address} {stat}"
            )
