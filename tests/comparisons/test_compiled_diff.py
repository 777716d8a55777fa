"""`hl.diff` of a model against itself compiled: what the compiler does wrong, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import hookline as hl

# The compiler asks inputs that are no leaves for their gradients; inductor is full of old names.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]
aten = torch.ops.aten


class Block(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.act = nn.ReLU()
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 2))


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def plant(operator: Any, other: Callable[..., Any], *, number: int, phase: str) -> Any:
    """Make a backend that takes one of its operators for another one."""

    def change(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        found = [node for node in graph.graph.nodes if node.target is operator]
        found[number].target = other
        graph.recompile()
        return make_boxed_func(graph.forward)

    def leave(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return make_boxed_func(graph.forward)

    is_forward = phase == "forward"
    return aot_autograd(
        fw_compiler=change if is_forward else leave, bw_compiler=leave if is_forward else change
    )


def halve(x: Tensor) -> Tensor:
    return x.clamp(min=0) / 2


def lose(grad: Tensor, value: Tensor, threshold: float) -> Tensor:
    return aten.threshold_backward(grad, value, 0.3)


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_model_agrees_with_itself_compiled(backend: str) -> None:
    model = make()
    found = hl.diff(
        model,
        torch.compile(model, backend=backend),
        (X,),
        loss=square,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
    )
    assert found.same, str(found)
    assert found.agree_to < 1e-5


BUGS = {
    "forward": (aten.relu.default, halve, 1, "1.act"),
    "backward": (aten.threshold_backward.default, lose, 0, "1.act"),
}


@pytest.mark.parametrize("is_first", [False, True], ids=["B", "A"])
@pytest.mark.parametrize("phase", BUGS)
def test_what_the_compiler_gets_wrong_is_found(phase: str, is_first: bool) -> None:
    operator, other, number, where = BUGS[phase]
    model = make()
    backend = plant(operator, other, number=number, phase=phase)
    sides = [model, torch.compile(model, backend=backend, fullgraph=True)]
    a, b = reversed(sides) if is_first else sides
    found = hl.diff(a, b, (X,), loss=square)
    assert (found.first, found.direction) == (where, phase)
    assert found.causes[0] == (
        "the compiled graph does that: without torch.compile both give the same"
    )


def test_what_is_wrong_without_the_compiler_too_is_confirmed_there() -> None:
    model, other = make(), make()
    other[1].norm.eps = 1e-2
    found = hl.diff(model, torch.compile(other, backend="aot_eager"), (X,), loss=square)
    assert found.first == "1.norm"
    assert found.graft is not None
    assert found.graft["verdict"] == "itself"
    assert any("without torch.compile" in note for note in found.notes)
    assert any("eps" in cause for cause in found.causes)


class Detached(Block):
    """A layer through which no gradient flows but past it; the forward is the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x).detach())))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_backward_that_is_wrong_is_of_the_module_around(is_compiled: bool) -> None:
    model, other = make(), make()
    other[1].__class__ = Detached
    call = torch.compile(other, backend="aot_eager") if is_compiled else other
    assert hl.diff(model, call, (X,), loss=square).first == "1"


def test_recordings_show_it_too(tmp_path: Path) -> None:
    model = make()
    hl.record(model, tmp_path / "eager", (X,), loss=square)
    backend = plant(aten.relu.default, halve, number=1, phase="forward")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    hl.record(compiled, tmp_path / "compiled", (X,), loss=square)
    assert hl.diff(tmp_path / "eager", tmp_path / "compiled").first == "1.act"
    found = hl.diff(tmp_path / "eager", compiled, loss=square)
    assert found.first == "1.act"
    assert found.graft is None
