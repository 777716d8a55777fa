"""Parts of a graph that may have no effects: a watch passes them by, others are told why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl


@pytest.fixture(autouse=True)
def _forget_graphs() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        out: Tensor = self.b(y)
        return out


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()
        self.other = Pair()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cond(x.sum() > -100, self.inner, self.other, (x,)))
        return out


@torch.compiler.nested_compile_region
def call_in_region(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = module(x)
    return out


class Nesting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(call_in_region(self.inner, x))
        return out


class Mapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.func.vmap(self.inner)(x))
        return out


KINDS: list[tuple[Callable[[], nn.Module], str]] = [
    (Branching, "torch.cond"),
    (Nesting, "torch.compiler.nested_compile_region"),
    (Mapping, "torch.func.vmap"),
]


def train(make: Callable[[], nn.Module], backend: str, *, is_watched: bool) -> tuple[Any, Any]:
    """Take two steps; give the parameters after them, and the watch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model) if is_watched else contextlib.nullcontext() as watched:
        for _ in range(2):
            optimizer.zero_grad()
            compiled(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
    return list(model.parameters()), watched


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("make", "region"), KINDS)
def test_a_watch_passes_them_by_and_says_so(make: Any, region: str, backend: str) -> None:
    plain, _ = train(make, backend, is_watched=False)
    parameters, watched = train(make, backend, is_watched=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, parameters, strict=True))
    assert watched.history.series("last:output", "count").values.tolist() == [12, 12]
    told = f"a compiled graph shows nothing of what is inside {region}: `inner:output`, "
    assert [one.startswith(told) for one in watched.notes] == [True]
    assert "last" not in watched.notes[0]


def test_a_watch_of_a_model_that_is_all_inside_says_so() -> None:
    model = Pair()
    compiled = torch.compile(lambda x: torch.func.vmap(model)(x), backend="aot_eager")
    with hl.watch(model) as watched:
        compiled(torch.randn(3, 4)).sum().backward()
    (told,) = watched.notes
    assert told.startswith("a compiled graph shows nothing of what is inside torch.func.vmap: ")


@pytest.mark.parametrize(("make", "region"), KINDS)
def test_a_capture_or_an_edit_there_is_refused_with_the_way_out(make: Any, region: str) -> None:
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4)
    truth = compiled(x)
    told = rf"(?s)inside {region} cannot be reached in a graph.*compiled=\"eager\""
    if torch.__version__ < "2.13" and region != "torch.func.vmap":
        told = "UnsupportedModel"  # all that torch says there of what was raised
    for open_session in (
        lambda: hl.capture(compiled, "inner.a"),
        lambda: hl.capture(compiled, "inner", grads=True),
        lambda: hl.edit(compiled, {"inner.a": hl.zero()}),
        lambda: hl.capture(compiled, "inner@y"),
        lambda: hl.capture(compiled, "inner/relu"),
        lambda: hl.edit(compiled, {"inner@y": hl.zero()}),
    ):
        with pytest.raises(Exception, match=told), open_session():
            compiled(x)
        torch.testing.assert_close(compiled(x), truth)
    with hl.capture(compiled, "last", grads=True) as got:
        compiled(x).sum().backward()
    torch.testing.assert_close(got["last"].output, truth)
    assert got["last"].output.grad.eq(1).all()


def test_a_vmap_is_heard_where_the_model_is_run_eagerly() -> None:
    model = Pair()
    compiled = torch.compile(lambda x: torch.func.vmap(model)(x), backend="aot_eager")
    x = torch.randn(3, 4)
    with hl.capture(model, "a", compiled="eager") as got:
        compiled(x)
    torch.testing.assert_close(got["a"].output, model.a(x))


class Checkpointing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()

    def double(self, x: Tensor) -> Tensor:
        z = x.sin()
        return z * 2

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, use_reentrant=False)
        y: Tensor = checkpoint(self.double, x, use_reentrant=False)
        return y


@pytest.mark.parametrize(
    ("site", "grads"), [("inner@y", True), ("inner/relu", False), ("@double.z", False)]
)
def test_variables_of_a_checkpointed_region_are_refused_with_the_way_out(
    site: str, grads: bool
) -> None:
    model = Checkpointing()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4)
    truth = compiled(x)
    told = r"(?s)(inside a checkpointed region|known only when it is called).*compiled=\"eager\""
    with pytest.raises(Exception, match=told), hl.capture(compiled, site, grads=grads):
        compiled(x)
    with hl.capture(compiled, site, compiled="eager") as got:
        compiled(x)
    assert got[site].shape == (3, 4)
    with hl.capture(compiled, "inner") as got:
        torch.testing.assert_close(compiled(x), truth)
    torch.testing.assert_close(got["inner"].output, model.inner(x))
    with hl.capture(compiled, "inner@y") as got:  # nothing but its values has to be known
        compiled(x)
    torch.testing.assert_close(got["inner@y"], model.inner.a(x).relu())
