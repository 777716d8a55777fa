"""What `hl.diff` says of arguments that cannot be meant, before it runs anything."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.testing import assert_same_run

X = torch.ones(2, 4)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def square(out: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"tolerance": -1.0}, ValueError, "`tolerance` is a relative error, 0 or more"),
        ({"tolerance": math.nan}, ValueError, "not nan"),
        ({"tolerance": math.inf}, ValueError, "not inf"),
        ({"tolerance": "1"}, TypeError, "not '1'"),
        ({"tolerance": True}, TypeError, "not True"),
        ({"allow": ["0"]}, TypeError, "`allow` maps patterns to relative errors"),
        ({"allow": {"0": -1}}, ValueError, "`allow` gives `0` -1"),
        ({"allow": {"0": math.nan}}, ValueError, "`allow` gives `0` nan"),
        ({"allow": {"0": "x"}}, TypeError, "`allow` gives `0` 'x'"),
        ({"allow": {0: 1e-3}}, TypeError, "patterns of sites for keys"),
        ({"names": ["a"]}, TypeError, "`names` maps paths of A to paths of B"),
        ({"names": {"0": 1}}, TypeError, "not '0' to 1"),
        ({"step": 7}, ValueError, "`step` is for runs"),
        ({"step": "7"}, TypeError, "number of a step"),
        ({"seed": "a"}, TypeError, "`seed` is a whole number"),
        ({"calibrate": 5}, TypeError, "`calibrate` is True, False"),
        ({"loss": 3}, TypeError, "`loss` is a function of the model's output"),
        ({"loss": lambda out: None}, TypeError, "`loss` gave None; .* is there a `return`"),
        ({"loss": lambda out: 1.0}, TypeError, "`loss` gave 1.0"),
        ({"loss": lambda out: out}, ValueError, r"`loss` gave a tensor of shape \(2, 4\)"),
        ({"loss": lambda out: out.sum() * 1j}, ValueError, "complex"),
        ({"loss": lambda out: out.detach().sum()}, ValueError, "needs no gradient"),
        ({"loss": lambda out: out.argmax()}, ValueError, "needs no gradient"),
        ({"optimizer": torch.optim.SGD}, TypeError, "there must be a `loss`"),
        ({"loss": square, "optimizer": lambda p: None}, TypeError, "`optimizer` gave None"),
        ({"loss": square, "optimizer": lambda p: X}, TypeError, "gave a `Tensor`"),
        ({"loss": square, "optimizer": torch.optim.LBFGS}, ValueError, "needs no closure"),
    ],
)
def test_arguments_that_cannot_be_meant_are_told(
    given: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = make_model()
    with pytest.raises(error, match=words):
        hl.diff(model, copy.deepcopy(model), (X,), **given)


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ([make_model()], "`b` is a list; hl.diff compares one model or run with one other"),
        (square, "`b` is a `function`"),
        (5, "`b` is 5"),
    ],
)
def test_sides_that_are_no_model_are_told(side: Any, words: str) -> None:
    with pytest.raises(TypeError) as raised:
        hl.diff(make_model(), side, (X,))
    assert words in str(raised.value)
    assert "Linear(" not in str(raised.value)


def test_loss_that_is_detached_in_one_model_is_a_difference_and_no_mistake() -> None:
    class Detached(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).detach()

    a, b = make_model(), Detached(nn.Linear(4, 4), nn.Tanh())
    b.load_state_dict(a.state_dict())
    found = hl.diff(a, b, (X,), loss=square)
    assert (found.same, found.direction) == (False, "backward")


def test_zero_and_wide_limits_are_allowed() -> None:
    model = make_model()
    assert hl.diff(model, copy.deepcopy(model), (X,), tolerance=0).same
    assert hl.diff(model, copy.deepcopy(model), (X,), allow={"0": 2}).same


def test_misspelt_allow_fails_a_test(tmp_path: Path) -> None:
    assert_same_run(make_model(), tmp_path / "baseline", (X,), update=True)
    with pytest.raises(ValueError, match=r"`zero` in allow="):
        assert_same_run(make_model(), tmp_path / "baseline", allow={"zero": 1e-3})
