"""Autograd functions of the user's own: whose backward it was, and on which line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from failing_models import line_of, origin_of
from torch import Tensor, nn

from hookline.replays import find_origin, keep_call

HERE = "tests/replays/test_function_origins.py"


class Rootish(torch.autograd.Function):
    """A root whose backward divides by what it gave."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.abs().sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad / (2 * y)  # the divisor


class Late(torch.autograd.Function):
    """The same, with its context set up after the forward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.abs().sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad / (2 * y)


class Act(nn.Module):
    """An activation that is nothing but a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function.apply(x)  # applied


class Net(nn.Module):
    """The activation between two layers; zeros go into it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 4), Act(function), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.fc2(self.act(self.fc1(x) * 0))


@pytest.mark.parametrize("function", [Rootish, Late])
def test_backward_of_a_function_is_its_own_and_not_its_readers(function: Any) -> None:
    origin = origin_of(Net(function), torch.randn(2, 4), backward=True)
    assert origin is not None
    assert (origin.site, origin.operation) == ("act", f"{function.__name__}Backward")
    assert origin.is_backward
    assert origin.why.endswith(f"are 0), in the backward of {function.__name__}")


def test_line_is_that_of_the_call_and_the_evidence_that_of_the_backward() -> None:
    origin = origin_of(Net(Rootish), torch.randn(2, 4), backward=True)
    assert origin is not None
    assert origin.source == f"{HERE}:{line_of('# ' + 'applied', __file__)}"
    inside = line_of("# " + "the divisor", __file__)
    assert origin.evidence == (f"in its backward: {HERE}:{inside}",)


class Twice(nn.Module):
    """A function applied to something safe and to zeros, on lines of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.fc(x)
        safe = Rootish.apply(h * h + 1)
        bad = Rootish.apply(h * 0)  # with zeros
        other = Rootish.apply(h * h + 2)
        return safe + bad + other


def test_one_of_several_applications_is_told_apart() -> None:
    origin = origin_of(Twice(), torch.randn(2, 4), backward=True)
    assert origin is not None
    assert origin.source == f"{HERE}:{line_of('# ' + 'with zeros', __file__)}"


def test_operation_that_no_line_of_the_model_calls_has_the_line_of_its_call() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    with torch.no_grad():
        model[0].weight.fill_(3e38)
    x = torch.full((2, 4), 1e3)
    call = keep_call(model, (x,), {})  # kept here
    model(x)
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.site == "0/linear"
    assert origin.source == f"{HERE}:{line_of('# ' + 'kept here', __file__)}"
