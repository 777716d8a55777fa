"""What hookline and a user's hook call at a variable are no operations of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Detaching(nn.Module):
    """A forward with one `detach` of its own, after a variable."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = y.detach()
        return z + 1


@pytest.mark.parametrize("clone", [False, True])
def test_keeping_a_variable_is_no_operation(clone: bool) -> None:
    model, x = Detaching(), torch.randn(2, 3)
    with hl.capture(model, "@y", "/*", clone=clone) as got:
        model(x)
    found = [row["site"] for row in got.table()]
    assert sorted(found) == ["/add", "/detach", "/mul", "@y"]
    assert torch.equal(got["/detach"], x * 2)


def test_operations_of_a_hook_are_not_counted() -> None:
    model, seen = Detaching(), []

    def look(value: Tensor, at: Any) -> None:
        value.detach().add(3).sum()

    hl.hook(model, "@y", look)
    hl.hook(model, "/*", lambda value, at: seen.append(at.address))
    model(torch.ones(2))
    assert seen == ["/mul[0]", "/detach[0]", "/add[0]"]


class Unhashable:
    """A function that cannot be a key of a dictionary."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


def test_callee_without_hash_can_be_asked_about() -> None:
    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.functions = [Unhashable()]

        def forward(self, x: Tensor) -> Tensor:
            function = self.functions[0]
            return function(x)

    model = Calling()
    with (
        pytest.raises(hl.NoSuchSite, match="it is no Python function"),
        hl.capture(model, "@function.y"),
    ):
        model(torch.ones(2))
