"""Which autograd function runs its forward, told from frames as they are before and after 2.14."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from hookline import _functions

_CALLS: list[list[str]] = []


@pytest.fixture(params=["as it is", "in C++"], autouse=True)
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take the names of the frames that `note` is called in; once without a frame of `apply`."""
    if request.param == "in C++":
        monkeypatch.setattr(_functions, "_APPLY", None)
    _CALLS.clear()
    found: list[str] = []
    _CALLS.append(found)
    return found


def note() -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        _CALLS[-1].append(_functions.name_function(frame))
        frame = frame.f_back


class Thrice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        note()
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Later(Function):
    """Its context is set up after the forward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        note()
        return x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def _wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any) -> Any:
        return forward(*args)

    return wrapper


class Decorated(Function):
    @staticmethod
    @_wrapped
    def forward(ctx: Any, x: Tensor) -> Tensor:
        note()
        return x * 3


class DecoratedLater(Function):
    @staticmethod
    @_wrapped
    def forward(x: Tensor) -> Tensor:
        note()
        return x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


@pytest.mark.parametrize("function", [Thrice, Later, Decorated, DecoratedLater])
def test_function_that_runs_is_named(function: Any, names: list[str]) -> None:
    function.apply(torch.ones(2, requires_grad=True))
    assert set(names) == {"", function.__name__}


def test_function_within_another_is_named_before_it(names: list[str]) -> None:
    class Outer(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return Thrice.apply(x)

    Outer.apply(torch.ones(2))
    assert list(dict.fromkeys(one for one in names if one)) == ["Thrice", "Outer"]


def test_forward_of_a_module_and_a_plain_call_name_none(names: list[str]) -> None:
    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            note()
            return x

    Noting()(torch.ones(2))
    Noting().forward(torch.ones(2))
    note()
    assert set(names) == {""}


def test_context_is_that_which_the_function_keeps() -> None:
    found: list[Any] = []

    class Keeping(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            found.extend([ctx, _functions.find_context(sys._getframe())])
            return x * 2

    Keeping.apply(torch.ones(2))
    assert found[0] is found[1]
    assert _functions.find_context(sys._getframe()) is None


def test_code_that_is_known_does_not_fill_memory(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    monkeypatch.setattr(_functions, "_MOST_KNOWN", 2)
    known: dict[int, Any] = {}
    monkeypatch.setattr(_functions, "_known", known)
    for _ in range(5):
        exec("def forward(x): note()\nforward(1)", {"note": note})
    assert len(known) <= 2
    assert set(names) == {""}
