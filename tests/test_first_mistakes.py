"""What a newcomer gets wrong first, and what hookline answers."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import hookline as hl


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("given", "kind"), [(hl.scale(0), "Action"), (hl.skip(0), "Skip"), ("0", "str"), (3, "int")]
)
def test_edit_without_a_dict_says_how_to_write_one(
    model: nn.Module, given: object, kind: str
) -> None:
    message = (
        "hl.edit takes a dict of what to do where, hl.edit(model, {'fc1': hl.scale(0)}); "
        f"not {kind}."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        hl.edit(model, given)  # type: ignore[arg-type]
    assert len(hl.inventory(model)) == 0


def test_capture_read_without_with_says_where_the_values_are(model: nn.Module) -> None:
    capture = hl.capture(model, "0")
    model(torch.ones(1, 4))
    message = (
        "a capture holds nothing itself; read what `with` gives: "
        "with hl.capture(...) as got: model(x); then got['0']."
    )
    with pytest.raises(hl.SessionError, match=f"^{re.escape(message)}$"):
        capture["0"]


@pytest.mark.parametrize("is_asked", [False, True])
def test_gradient_that_never_came_says_what_it_takes(model: nn.Module, is_asked: bool) -> None:
    """Also where backward ran after the block, which no record can know."""
    if is_asked:
        with (
            pytest.warns(
                hl.HooklineWarning,
                match="no backward reached a captured site",
            ),
            hl.capture(model, "0", grads=True) as got,
        ):
            loss = model(torch.ones(1, 4)).sum()
        loss.backward()
    else:
        with hl.capture(model, "0") as got:
            model(torch.ones(1, 4)).sum().backward()
    message = (
        "`0:output.grad` has no gradient: none came while the capture was open. To get one: "
        "capture with grads=True, call loss.backward() inside the block, and let the loss depend "
        "on it."
    )
    with pytest.raises(hl.NotCaptured, match=f"^{re.escape(message)}$"):
        got["0:output.grad"]


def test_pattern_cannot_be_read_and_says_what_can(model: nn.Module) -> None:
    with hl.capture(model, "*") as got:
        model(torch.ones(1, 4))
    message = (
        "`*` is a pattern, and reading takes one address. "
        "Loop over the capture (`for visit in got`), or read got.tensors()."
    )
    with pytest.raises(hl.NotCaptured, match=f"^{re.escape(message)}$"):
        got["*"]
    assert "*" not in got
    assert [visit.path for visit in got] == ["0", "1"]


def test_visit_taken_for_a_tensor_says_where_the_tensor_is(model: nn.Module) -> None:
    with hl.capture(model, "0") as got:
        model(torch.ones(1, 4))
    message = (
        "a captured visit has no `shape`; what the module returned is in `.output`, "
        "what it received in `.inputs`"
    )
    with pytest.raises(AttributeError, match=f"^{re.escape(message)}$"):
        got["0"].shape
    assert not hasattr(got["0"], "shape")
    assert got["0"].output.shape == (1, 3)


def test_action_prints_as_it_was_written() -> None:
    assert repr(hl.zero()) == "zero()"
    assert repr(hl.add(1).where(rows=0, calls=[1, 2])) == "add(1).where(calls=[1, 2], rows=0)"
