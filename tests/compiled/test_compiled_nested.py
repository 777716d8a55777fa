"""Nested tensors with a jagged layout in compiled models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookline as hl

pytestmark = pytest.mark.filterwarnings(
    # It asks this of the inputs of a graph, and some have a history.
    "ignore:The .grad attribute of a Tensor:UserWarning"
)


def batch(number: int) -> Tensor:
    """Make a batch of two rows, the second of another length each time."""
    draw = torch.Generator().manual_seed(number)
    rows = [torch.randn(size, 4, generator=draw) for size in (3, 2 + number)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def make() -> nn.Module:
    """Make a model of layers that take such batches."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))


def train(model: nn.Module, called: Any) -> list[Tensor]:
    """Train a model; give the losses and the last parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(4):
        optimizer.zero_grad()
        loss = called(batch(number)).values().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *[one.detach() for one in model.parameters()]]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_watch_measures_them_and_changes_nothing(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    model = make()
    plain = train(model, torch.compile(model, backend=counter, fullgraph=True))
    graphs = counter.frame_count
    torch._dynamo.reset()
    model = make()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with hl.watch(compiled, strict=True) as watch:
        watched = train(model, compiled)
    assert all(torch.equal(one, other) for one, other in zip(watched, plain, strict=True))
    assert counter.frame_count == 2 * graphs
    model = make()
    with hl.watch(model, strict=True) as expected:
        train(model, model)
    rows = [one.table(stats=("rms", "count")) for one in (watch, expected)]
    found = [{row["site"]: (row["rms"], row["count"]) for row in one} for one in rows]
    assert found[0].keys() == found[1].keys()
    for site, numbers in found[1].items():
        assert found[0][site] == pytest.approx(numbers, rel=1e-5), site
    assert {"1:output", "1:output.grad"} <= found[0].keys()
    assert watch.notes == expected.notes == []


def test_they_are_edited() -> None:
    model = make()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    found = []
    for one in (model, compiled):
        with hl.edit(one, {"1": hl.scale(2.0)}):
            found.append(one(batch(0)).values())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("grads", [False, True])
def test_a_capture_breaks_the_graph_or_says_what_to_do(grads: bool) -> None:
    model = make()
    expected = model[0](batch(0)).values()
    compiled = torch.compile(model, backend="aot_eager")
    with hl.capture(compiled, "0", grads=grads) as got:
        compiled(batch(0)).values().sum().backward()
    assert torch.equal(got["0"].output.values(), expected)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with (
        pytest.raises(Exception, match=r"a nested tensor cannot be kept .*compiled=\\?.eager"),
        hl.capture(compiled, "0", grads=grads),
    ):
        compiled(batch(0))
    with hl.capture(compiled, "0", grads=grads, compiled="eager") as got:
        compiled(batch(0)).values().sum().backward()
    assert torch.equal(got["0"].output.values(), expected)
