"""Compiled trainings that go wrong, break their graphs, or are compiled more often than allowed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_trainings import (
    Compile,
    Stack,
    as_function,
    assert_same_rows,
    in_place,
    train_twins,
    wrap,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from trainings import batches, plain_loop

import hookline as hl

# The compiler asks inputs that are no leaves for their gradients.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Divided(nn.Module):
    """Divide by zero when all inputs are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) / (x.sum() != 0))


def _train_to_zero(call: Callable[..., Any], model: nn.Module) -> hl.Watch:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model) as watched:
        for number, batch in enumerate(batches(5, 3)):
            optimizer.zero_grad()
            call(batch * (number != 2)).square().mean().backward()
            optimizer.step()
    return watched


@pytest.mark.parametrize("way", [wrap, in_place])
def test_the_operation_behind_a_value_is_found_without_the_graph(way: Compile) -> None:
    model = Divided()
    watched = _train_to_zero(way(model, "aot_eager"), model)
    finding = watched.findings[0]
    assert (finding.rule, finding.step, finding.site) == ("non-finite", 2, "/div")
    assert "division by zero" in watched.verdict
    assert watched.notes == ["the step was run again without torch.compile to find the operation"]


def test_in_a_compiled_function_the_module_is_found_and_the_rest_noted() -> None:
    model = Divided()
    watched = _train_to_zero(as_function(model, "aot_eager"), model)
    finding = watched.findings[0]
    assert (finding.rule, finding.step, finding.site) == ("non-finite", 2, "second")
    (note,) = watched.notes
    assert "was not looked for" in note
    assert "compiled" in note


class Talking(nn.Module):
    """Run code in the middle that no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.start(x)
        torch._dynamo.graph_break()
        for block in self.inner.blocks:
            x = block(x)
        return self.inner.head(x)


def test_a_graph_break_is_noted_and_measured_around() -> None:
    def compile(model: nn.Module, backend: Any) -> Callable[..., Any]:
        return torch.compile(model, backend=backend)

    twins = train_twins(Talking, plain_loop(5, 3), compile)
    assert_same_rows(twins.eager, twins.compiled)
    assert twins.graphs == twins.plain_graphs == 2
    (note,) = [one for one in twins.compiled.notes if "graph" in one]
    assert note.startswith("torch.compile broke its graph at a place, which is heard as well: ")
    assert "test_watch_compiled_troubles.py:" in note


def test_a_recompile_limit_falls_back_to_hooks() -> None:
    def compile(model: nn.Module, backend: Any) -> Callable[..., Any]:
        return torch.compile(model, backend=backend, dynamic=False)

    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for rows in (4, 5, 6, 7, 4, 6):
            optimizer.zero_grad()
            loss = model(batches(rows, 3, count=1)[0]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    with torch._dynamo.config.patch(recompile_limit=2):
        twins = train_twins(Stack, train, compile)
    assert_same_rows(twins.eager, twins.compiled)
    assert twins.graphs == twins.plain_graphs == 2
    assert any("recompile_limit" in note for note in twins.compiled.notes)
    assert twins.compiled.failure is None


class Looked(nn.Module):
    """Look up words, which may not be there."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.words(numbers))


@pytest.mark.parametrize("way", [wrap, as_function])
def test_an_error_inside_of_a_graph_leaves_the_watch_going(way: Compile) -> None:
    model = Looked()
    call = way(model, "aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model) as watched:
        for number in range(4):
            optimizer.zero_grad()
            if number == 1:
                with pytest.raises(IndexError):
                    call(torch.tensor([0, 7]))
            call(torch.tensor([0, 1])).square().mean().backward()
            optimizer.step()
    assert watched.series("head", "count").values.tolist() == [4.0] * 4
    assert watched.failure is None


UNLOADED = """
import sys
import torch
from torch import nn
import hookline as hl

model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
with hl.watch(model) as watched:
    assert "torch._dynamo" not in sys.modules
    call = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        call(torch.ones(2, 3)).sum().backward()
        watched.step()
print(watched.series("0:output.grad", "count").values.tolist())
"""

LEFT = """
import sys
import torch
from torch import nn
import hookline as hl

model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
with hl.watch(model) as watched:
    with hl.capture(model, "*"):
        assert "torch._dynamo" not in sys.modules
        call = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        call(torch.ones(2, 3)).sum().backward()
        watched.step()
print(watched.series("0:output.grad", "count").values.tolist())
"""


@pytest.mark.parametrize("script", [UNLOADED, LEFT], ids=["alone", "left by a capture"])
def test_a_watch_may_begin_before_the_compiler_is_loaded(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[8.0, 8.0, 8.0]"


def test_a_step_that_is_compiled_as_a_whole_is_watched() -> None:
    """Forward, backward and the optimizer in one function: its graphs break, and all is heard."""

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        inner = getattr(model, "_orig_mod", model)

        def step(batch: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = inner(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        if inner is not model:
            step = torch.compile(step, backend="aot_eager")
        return [step(batch) for batch in batches(4, 3)]

    twins = train_twins(Stack, loop, wrap, strict=True)
    assert_same_rows(twins.eager, twins.compiled, rel=1e-3)  # AdamW's sums are compiled as well


def test_a_capture_that_comes_and_goes_takes_no_gradient_from_a_watch() -> None:
    """The backward of a graph that was traced for both is heard by who is still there."""
    model = Stack()
    call = wrap(model, "aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, None, strict=True) as watched:
        for number, batch in enumerate(batches(3, 3)):
            optimizer.zero_grad()
            if number == 1:
                with hl.capture(model, "blocks.0", ""):
                    loss = call(batch).square().mean()
            else:
                loss = call(batch).square().mean()
            loss.backward()
            optimizer.step()
    for address in ("blocks.0:output.grad", ":output.grad"):
        counts = watched.history.series(address, "count").values.tolist()
        assert counts == [counts[0]] * 4
