"""One tensor in several places of a compiled module: its gradient is heard of all together."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

pytestmark = [
    # The compiler makes one of each autograd.Function that it traces.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # It asks this of the inputs of a graph, and some have a history.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, a: Tensor, b: list[Tensor], c: Tensor) -> Tensor:
        mixed: Tensor = self.fc(a) * 2 + b[0] * 3 + c * 5
        return mixed + mixed


class HandingBack(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.same = nn.Linear(4, 4), Mixing(), HandingBack()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        mixed = self.mix(h, [h], c=h)
        one, other = self.same(mixed)
        attended, _ = self.attend(h, h, h, need_weights=False)
        return (attended * one * 2 + other.sin() + mixed * h).sum()


def run(model: nn.Module, session: Any) -> Tensor:
    """Call a model in a session; give the gradient of its first weight."""
    model.zero_grad()
    with session:
        model(torch.linspace(-1, 1, 24).reshape(2, 3, 4)).backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return gradient.clone()


@pytest.fixture
def twins() -> tuple[nn.Module, Any]:
    """Give a model, and a copy of it that is compiled."""
    model = Model()
    return model, torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    "sites",
    [
        ["mix:input.a.grad"],
        ["mix:input.b[0].grad"],
        ["mix:input.a.grad", "mix:input.c.grad"],
        ["mix:input", "attend:input"],
        ["attend:input.key.grad"],
        ["same:output[0].grad"],
        ["same:output[1].grad"],
        ["mix/add[2]:input[0].grad"],
        ["mix/add[2]:input[1].grad"],
    ],
    ids=str,
)
def test_the_gradient_is_heard_where_it_is_asked_for(
    twins: tuple[nn.Module, Any], sites: list[str]
) -> None:
    found = []
    for one in twins:
        with hl.capture(one, sites, grads=True) as got:
            run(one, contextlib.nullcontext())
        found.append(got.tensors())
    assert set(found[1]) == set(found[0])
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


@pytest.mark.parametrize(
    "site",
    ["mix:input.a.grad", "mix:input.b[0].grad", "same:output[1].grad", "mix/add[2]:input[0].grad"],
)
def test_the_gradient_is_edited_as_it_is_heard(twins: tuple[nn.Module, Any], site: str) -> None:
    gradients = [run(one, hl.edit(one, {site: hl.scale(0.5)})) for one in twins]
    torch.testing.assert_close(*gradients)


def test_a_value_is_edited_in_one_place(twins: tuple[nn.Module, Any]) -> None:
    gradients = [run(one, hl.edit(one, {"mix:input.c": hl.scale(0.5)})) for one in twins]
    torch.testing.assert_close(*gradients)


def test_a_watch_measures_what_a_module_sends_back_to_its_input(
    twins: tuple[nn.Module, Any],
) -> None:
    rows = []
    for one in twins:
        watch = hl.watch(one, sites=["mix:input.grad", "attend:input.grad"], parameters=None)
        with watch:
            run(one, contextlib.nullcontext())
            watch.step()
        rows.append({row["site"]: row["rms"] for row in watch.table(stats=("rms",))})
    assert rows[1] == pytest.approx(rows[0])
    assert rows[0]["mix:input.a.grad"] != pytest.approx(rows[0]["attend:input.query.grad"])


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.add_(y)
        return y.sin().sum()


@pytest.mark.parametrize("site", ["/add_:input", "/add_:input[0].grad", "/add_:input[1].grad"])
def test_what_is_added_to_itself_has_one_gradient(site: str) -> None:
    found = []
    for one in (Doubling(), torch.compile(Doubling(), backend="aot_eager", fullgraph=True)):
        with hl.capture(one, site, grads=True) as got:
            one(torch.ones(3, requires_grad=True)).backward()
        found.append({name: one for name, one in got.tensors().items() if "grad" in name})
    torch.testing.assert_close(found[1], found[0])
