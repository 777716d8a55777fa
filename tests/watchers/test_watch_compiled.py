"""Watching compiled trainings: the rows of the eager twin, the bits of the unwatched one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from compiled_trainings import (
    Compile,
    Stack,
    as_function,
    assert_same_rows,
    in_parts,
    in_place,
    train_twins,
    wrap,
)
from torch import Tensor, nn
from trainings import plain_loop

import hookline as hl

# The compiler asks inputs that are no leaves for their gradients.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

WAYS: dict[str, Compile] = {
    "torch.compile(model)": wrap,
    "model.compile()": in_place,
    "each block": in_parts,
    "a function": as_function,
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_the_eager_twin(way: str) -> None:
    twins = train_twins(Stack, plain_loop(5, 3), WAYS[way])
    assert_same_rows(twins.eager, twins.compiled)
    assert twins.compiled.notes == []
    assert twins.graphs == twins.plain_graphs == 1


@pytest.mark.parametrize("way", ["torch.compile(model)", "a function"])
def test_a_model_may_be_compiled_while_it_is_watched(way: str) -> None:
    twins = train_twins(Stack, plain_loop(5, 3), WAYS[way], is_later=True)
    assert_same_rows(twins.eager, twins.compiled)
    assert twins.compiled.notes == []


class Attending(nn.Module):
    """Take one tensor in several places, and give one in several."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
        last = self.layer(query) + key * value
        return {"last": last, "all": (query, last)}


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.attend = Attending()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        found = self.attend(x, key=x, value=x)
        last: Tensor = found["last"] + found["all"][1]
        return last


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_tensor_in_several_places_has_a_row_for_each(backend: str) -> None:
    torch._dynamo.reset()
    model, x = Attended(), torch.randn(2, 4)
    rows = []
    for one in (model, torch.compile(model, backend=backend)):
        with hl.watch(one, sites=["attend", "attend:input"], parameters=None) as watched:
            one(x).square().sum().backward()
            watched.step()
        table = watched.table(stats=("l2",))
        rows.append({row["site"]: row["l2"] for row in table})
    assert rows[1] == pytest.approx(rows[0], rel=1e-5)
    assert {f"attend:input.{name}" for name in ("query", "key", "value")} <= set(rows[0])
