"""Looking at compiled models: an example runs without their graphs, a check with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import Weighing
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookline as hl


def wrap(model: nn.Module, backend: object) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: object) -> nn.Module:
    model.compile(backend=backend, fullgraph=True)
    return model


X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("compile", [wrap, in_place])
def test_an_example_shows_what_the_model_does(
    compile: Callable[[nn.Module, object], nn.Module],
) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain = Weighing()
    expected = [
        str(hl.sites(plain, "**", example=X)),
        str(hl.sites(plain, "/*", example=X)),
        str(hl.source(plain, example=X)),
    ]
    model = compile(plain, counter)
    model(X)
    assert counter.frame_count == 1
    assert str(hl.sites(model, "**", example=X)) == expected[0]
    assert str(hl.sites(model, "/*", example=X)) == expected[1]
    assert str(hl.source(model, example=X)) == expected[2]
    model(X)
    assert counter.frame_count == 1


def test_a_check_runs_the_graph() -> None:
    torch._dynamo.reset()
    model = Weighing()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert hl.check(compiled, X, loss=lambda out: out.square().mean()).ok
    with torch.no_grad():
        model.inner.weight[0, 0] = torch.nan
    found = hl.check(compiled, X, loss=lambda out: out.square().mean())
    assert not found.ok
    assert found.findings[0].rule == "non-finite"
