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


@pytest.mark.parametrize("is_later", [False, True], ids=["before", "later"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_the_eager_twin(way: str, is_later: bool) -> None:
    twins = train_twins(Stack, plain_loop(5, 3), WAYS[way], is_later=is_later)
    assert_same_rows(twins.eager, twins.compiled)
    assert twins.compiled.notes == []
