"""Whatever a module does with its tensors, watching its gradients leaves the run as it is."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor
from tricky_modules import CASES, make, results

import hookline as hl

UNUSED_INPUT = ("returns its parameter", "input unused")


def _compare(got: dict[str, Tensor], expected: dict[str, Tensor], *, exact: bool) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if exact:
            assert torch.equal(got[name], value), name
        else:  # a tap on an input groups the sum of its gradients in another way
            torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize("name", CASES)
def test_output_gradients_are_bit_identical(name: str) -> None:
    expected = results(*make(name))
    model, x = make(name)
    with hl.hook(model, "inner:output.grad", lambda grad, at: None):
        _compare(results(model, x), expected, exact=True)


@pytest.mark.parametrize("name", CASES)
def test_input_gradients_change_nothing(name: str) -> None:
    expected = results(*make(name))
    model, x = make(name)
    with hl.hook(model, "inner:input.grad", lambda grad, at: None):
        _compare(results(model, x), expected, exact=False)


@pytest.mark.parametrize("name", CASES)
def test_backward_hook_fires_and_changes_nothing(name: str) -> None:
    expected = results(*make(name))
    model, x = make(name)
    fired = []
    with hl.register_backward_hook(model, "inner", lambda m, gi, go: fired.append(gi)):
        _compare(results(model, x), expected, exact=False)
    assert len(fired) == (2 if name == "called twice" else 1)


@pytest.mark.parametrize("name", CASES)
def test_capture_of_everything_changes_nothing(name: str) -> None:
    expected = results(*make(name))
    model, x = make(name)
    capture = hl.capture(model, "**", inputs=True, grads="all", clone=True)
    warns = pytest.warns(hl.HooklineWarning, match=r"inner:input\.grad: no gradient")
    with warns if name in UNUSED_INPUT else contextlib.nullcontext(), capture as got:
        _compare(results(model, x), expected, exact=False)
    assert torch.equal(got["first"].output.grad, got["first:output.grad"])
