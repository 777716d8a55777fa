"""Watching compiled trainings: the rows of the eager twin, the bits of the unwatched one."""

from __future__ import annotations

import pytest
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
from trainings import plain_loop

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
