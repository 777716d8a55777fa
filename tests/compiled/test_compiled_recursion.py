"""Modules that call themselves inside of a graph: each execution is a visit, as it is eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Again(nn.Module):
    """Call itself, several times over if asked for, with a layer before and one after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, deep: int = 2, wide: int = 1) -> Tensor:
        x = self.first(x)
        for _ in range(wide if deep else 0):
            x = self(x, deep - 1, wide) * 2 + 1
        out: Tensor = self.last(x)
        return out


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Again()

    def forward(self, x: Tensor, *args: int) -> Tensor:
        out: Tensor = self.inner(x, *args) * 2
        return out


def wrap(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def in_place(model: nn.Module) -> Callable[..., Any]:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def function(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(lambda *args: model(*args) * 1, backend="aot_eager", fullgraph=True)


both_kinds = pytest.mark.parametrize("kind", [Again, Around])
all_ways = pytest.mark.parametrize("way", [wrap, in_place, function])


def capture(model: nn.Module, call: Callable[..., Any], *args: Any) -> dict[Any, Any]:
    """Give the values and gradients of two calls, by call, module and visit."""
    with hl.capture(model, "**", grads=True) as got:
        for factor in (1, 2):
            call(factor * args[0], *args[1:]).sum().backward()
    return {
        (number, one.path, one.visit): (one.output, one.output.grad)
        for number, visits in enumerate(got.calls)
        for one in visits
    }


@both_kinds
@all_ways
@pytest.mark.parametrize("args", [(2, 1), (1, 3), (2, 2), (0,)])
def test_values_are_those_of_their_visits(
    kind: type[nn.Module], way: Callable[..., Any], args: tuple[int, ...]
) -> None:
    model, x = kind(), torch.randn(2, 4)
    truth = capture(model, model, x, *args)
    call = way(model)
    plain = call(x, *args)
    heard = capture(model, call, x, *args)
    assert heard.keys() == truth.keys()
    for key, values in truth.items():
        for value, expected in zip(heard[key], values, strict=True):
            torch.testing.assert_close(value, expected, msg=lambda text, key=key: f"{key}: {text}")
    assert torch.equal(call(x, *args), plain)


@both_kinds
@all_ways
def test_edits_of_a_visit_are_made_there(kind: type[nn.Module], way: Callable[..., Any]) -> None:
    model, x = kind(), torch.randn(2, 4)
    site = "inner" if kind is Around else ""
    sites = [site, f"{site}.last" if site else "last"]

    def edit(call: Callable[..., Any], one: str) -> Tensor:
        with hl.edit(model, {one: hl.add(1.0)}) as edits:
            out: Tensor = call(x)
        assert [row["applied"] for row in edits.report()] == [3]
        return out

    truth = [edit(model, one) for one in sites]
    call = way(model)
    for one, expected in zip(sites, truth, strict=True):
        torch.testing.assert_close(edit(call, one), expected)


@both_kinds
@all_ways
def test_all_visits_are_measured(kind: type[nn.Module], way: Callable[..., Any]) -> None:
    model, x = kind(), torch.randn(2, 4)

    def measure(call: Callable[..., Any]) -> dict[Any, Any]:
        with hl.watch(model, None, rules=False) as watcher:
            call(x).sum().backward()
            watcher.step()
            call(x).sum().backward()
        return {
            row["site"]: (row["count"], row["absmax"])
            for row in watcher.table(stats=("count", "absmax"))
        }

    truth = measure(model)
    heard = measure(way(model))
    assert heard.keys() == truth.keys()
    for site, values in truth.items():
        assert heard[site] == pytest.approx(values), site


class InRegion(nn.Module):
    """Run a module that calls itself in a checkpointed region."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Again()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def test_what_cannot_be_followed_in_a_region_is_run_as_it_is_or_refused() -> None:
    model, x = InRegion(), torch.randn(2, 4, requires_grad=True)

    def capture(run: Any) -> list[Tensor]:
        with hl.capture(model, "inner", grads=True) as got:
            run(x).sum().backward()
        outputs = [got["inner", visit].output for visit in range(3)]
        return [*outputs, *(one.grad for one in outputs)]

    heard = capture(torch.compile(model, backend="aot_eager"))
    torch.testing.assert_close(heard, capture(model))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="calls itself inside a checkpointed region"):
        capture(torch.compile(model, backend="aot_eager", fullgraph=True))
