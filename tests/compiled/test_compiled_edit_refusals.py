"""What an edit cannot do inside a compiled graph is said when it is attached, or when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from small_models import Branches, Net, Twice, Wrapped
from torch import nn

import hookline as hl

HINT = 'Ask for the model to be run eagerly: compiled="eager"'


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager", fullgraph=True)


ATTACH: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a function": (
        lambda model: hl.edit(model, {"fc1": lambda value, at: value}),
        "hl.edit(fc1): a function of Python's cannot run at `fc1:output`",
    ),
    "noise": (
        lambda model: hl.edit(model, {"fc1": hl.noise(1.0)}),
        "hl.edit(fc1): noise(1.0, seed=0), another one for each value, cannot be made at "
        "`fc1:output`",
    ),
    "visits": (
        lambda model: hl.edit(model, {"fc1": hl.scale(2)}, visits=0),
        "hl.edit(fc1): an edit for some visits or calls cannot be made at `fc1:output`",
    ),
    "calls": (
        lambda model: hl.edit(model, {"fc1": hl.scale(2).where(calls=0)}),
        "hl.edit(fc1): an edit for some visits or calls cannot be made at `fc1:output`",
    ),
}


@pytest.mark.parametrize("name", ATTACH)
def test_what_takes_python_is_refused_at_once(name: str) -> None:
    attach, text = ATTACH[name]
    model = Net()
    compiled = _compiled(model)
    with pytest.raises(hl.UnsupportedModel) as error:
        attach(compiled)
    assert str(error.value) == f"{text} inside a graph that torch.compile made. {HINT}"
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    attach(model).remove()  # the model itself is not compiled


@pytest.mark.parametrize("value", [torch.zeros(2, 4), lambda at: torch.zeros(2, 4)])
def test_a_skip_is_refused_and_made_eagerly(value: Any) -> None:
    compiled = _compiled(Net())
    with pytest.raises(hl.UnsupportedModel, match=r"hl\.skip at `fc1` cannot be made") as error:
        hl.edit(compiled, {"fc1": hl.skip(value)})
    assert str(error.value).endswith(HINT)
    with hl.edit(compiled, {"fc1": hl.skip(value)}, compiled="eager"):
        assert torch.equal(compiled(torch.ones(2, 3)), compiled._orig_mod.fc2.bias.expand(2, 2))


def test_python_runs_where_the_model_is_run_eagerly() -> None:
    model = Net()
    compiled = _compiled(model)
    seen = []
    with hl.edit(compiled, {"fc1": lambda value, at: seen.append(at) or value}, compiled="eager"):
        compiled(torch.ones(2, 3))
    assert len(seen) == 1


def test_a_patch_of_each_visit_asks_for_one() -> None:
    compiled = _compiled(Twice())
    with hl.capture(compiled, "fc") as got:
        compiled(torch.ones(2, 3))
    with pytest.raises(hl.UnsupportedModel, match=r"patch\(same site\), another one for each"):
        hl.edit(compiled, {"fc": hl.patch(got)})
    with hl.edit(compiled, {"fc": hl.patch(got, visit=0)}):
        assert torch.equal(compiled(torch.zeros(2, 3)), got["fc", 0].output)


def test_a_patch_of_one_visit_is_not_put_into_another() -> None:
    model = Twice()
    compiled = _compiled(model)
    with hl.capture(compiled, "fc", visits=0) as got:
        compiled(torch.ones(2, 3))
    with (
        pytest.raises(hl.EditError, match=r"`fc:output`, call 0, visit 1: which value it is was"),
        hl.edit(compiled, {"fc": hl.patch(got)}),
    ):
        compiled(torch.ones(2, 3))


def test_the_gradient_of_what_is_written_over_is_not_edited() -> None:
    compiled = _compiled(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)))
    with pytest.raises(hl.UnsupportedModel, match=r"writes over \(inplace=True\)"):
        hl.edit(compiled, {"1:input.grad": hl.scale(2)})


RUN: dict[str, tuple[Any, str]] = {
    "another shape": (
        hl.set(torch.zeros(3, 3)),
        "the edit at `fc1:output`, call 0, visit 0 returned shape (3, 3) for (2, 4). "
        "Return a tensor of the same shape, e.g. new.expand_as(value).",
    ),
    "another type": (
        hl.set(torch.zeros(2, 4, dtype=torch.float64)),
        "the edit at `fc1:output`, call 0, visit 0 returned torch.float64 for torch.float32. "
        "Return new.to(value.dtype).",
    ),
    "more dimensions": (
        hl.add(torch.zeros(5, 2, 4)),
        "the edit at `fc1:output`, call 0, visit 0 returned shape (5, 2, 4) for (2, 4). "
        "Return a tensor of the same shape, e.g. new.expand_as(value).",
    ),
    "a vector of another size": (
        hl.add(torch.zeros(7)),
        "add(tensor(7,)) does not fit `fc1:output`: a tensor of shape (7,) does not go with one of "
        "(2, 4)",
    ),
    "rows outside": (
        hl.add(1).where(rows=9),
        "`fc1:output` has 2 entries in dimension 0; 9 is outside.",
    ),
    "no such dimension": (
        hl.add(1).where(rows=1, row_dim=5),
        "`fc1:output` has 2 dimensions, so there is no dimension 5 to select rows or positions in. "
        "Give row_dim or position_dim.",
    ),
    "no such row": (
        hl.swap_rows(0, 9),
        "swap_rows at `fc1:output`: there are 2 rows in dimension 0; 0, 9 is no order of them.",
    ),
    "no order": (
        hl.swap_rows([0]),
        "swap_rows at `fc1:output`: there are 2 rows in dimension 0; [0], None is no order of "
        "them.",
    ),
    "rows of another shape": (
        hl.set(torch.zeros(3, 3)).where(rows=0),
        "set(tensor(3, 3)) at `fc1:output` gave shape (3, 3) for (2, 4), so rows and positions "
        "cannot be told apart.",
    ),
}


@pytest.mark.parametrize("name", RUN)
def test_what_does_not_fit_is_told_when_the_graph_runs(name: str) -> None:
    action, text = RUN[name]
    compiled = _compiled(Net())
    with pytest.raises(hl.EditError) as error, hl.edit(compiled, {"fc1": action}):
        compiled(torch.ones(2, 3))
    assert str(error.value) == text


def test_a_gradient_edit_that_does_not_fit_is_told_when_the_graph_runs() -> None:
    compiled = _compiled(Net())
    with (
        pytest.raises(hl.EditError, match=r"add\(tensor\(7,\)\) does not fit `fc1:output`"),
        hl.edit(compiled, {"fc1:output.grad": hl.add(torch.zeros(7))}),
    ):
        compiled(torch.ones(2, 3)).sum().backward()


def test_an_action_needs_one_tensor() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branches()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)["a"]
            return out

    compiled = _compiled(Wrapped(Model()))
    with pytest.raises(hl.EditError) as error, hl.edit(compiled, {"inner.inner": hl.scale(2)}):
        compiled(torch.ones(2, 3))
    assert str(error.value) == (
        "scale(2) at `inner.inner:output` needs one tensor, and there are 3: "
        "`inner.inner:output.a`, `inner.inner:output.b[0]`, `inner.inner:output.b[1][0]`. "
        "Name one of them."
    )
    with (
        pytest.raises(hl.NoSuchSite, match=r"there is no `\.z` in it\. Tensors there: \.a"),
        hl.edit(compiled, {"inner.inner:output.z": hl.scale(2)}),
    ):
        compiled(torch.ones(2, 3))


def test_edits_that_never_ran_are_told() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    compiled = _compiled(Branch())
    with (
        pytest.warns(hl.HooklineWarning, match=r"never applied:\n  unused:output: zero\(\)"),
        hl.edit(compiled, {"used": hl.zero(), "unused": hl.zero()}),
    ):
        compiled(torch.ones(2, 3))
