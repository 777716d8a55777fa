"""The report of a capture: each status with its reason, and the warning as a user reads it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Branches, Net, Twice, Wrapped
from torch import Tensor, nn

import hookline as hl


class Partly(nn.Module):
    """One layer that runs, one that is bypassed, one that is never used, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.bypassed = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.used(x)) + self.bypassed.forward(x)


def run(
    model: nn.Module, *where: Any, step: Callable[[], Any], **options: Any
) -> tuple[hl.Captured, list[str]]:
    """Run a step inside a capture; give the results and the text of each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hl.capture(model, *where, **options) as got:
            step()
    assert all(one.category is hl.HooklineWarning for one in caught)
    return got, [str(one.message) for one in caught]


def the_one(got: hl.Captured) -> Any:
    """Give the only problem of a report."""
    (problem,) = got.report().problems
    return problem


def test_all_captured_says_nothing() -> None:
    net = Net()
    got, told = run(net, "fc1", step=lambda: net(torch.ones(1, 3)))
    assert told == []
    assert got.report().problems == []
    assert [(one.address, one.status) for one in got.report().outcomes] == [
        ("fc1:output", "captured")
    ]
    assert got.report().table().title == "1 of 1 sites captured"


def test_warning_lists_each_site_with_reason_and_fix() -> None:
    model, x = Partly(), torch.ones(1, 3)
    got, told = run(model, "used", "bypassed", "unused", step=lambda: model(x))
    assert told == [
        "hookline: not everything was captured as asked:\n"
        "  bypassed:output: bypassed: `Partly.forward` calls `self.bypassed.forward()` directly, "
        "which skips hooks; write `self.bypassed(...)` there\n"
        "  unused:output: never called: the model ran without calling it: a branch not taken, or "
        "unused; run an input that takes the branch, or leave this address out"
    ]
    assert {one.address: one.status for one in got.report().outcomes} == {
        "used:output": "captured",
        "bypassed:output": "bypassed",
        "unused:output": "never called",
    }


def test_warning_points_at_the_users_line() -> None:
    net = Net()
    with pytest.warns(hl.HooklineWarning) as caught, hl.capture(net, "fc1"):
        pass
    assert caught[0].filename == __file__


def test_reason_is_told_when_the_value_is_read() -> None:
    model = Partly()
    got, _ = run(model, "unused", step=lambda: model(torch.ones(1, 3)))
    with pytest.raises(hl.NotCaptured) as caught:
        got["unused"]
    assert str(caught.value) == (
        "`unused` has no value in this capture. The model ran without calling it: a branch not "
        "taken, or unused: run an input that takes the branch, or leave this address out."
    )


def test_model_that_was_not_called() -> None:
    got, told = run(Net(), "fc1", "fc1.weight", step=lambda: None)
    assert told == [
        "hookline: not everything was captured as asked:\n"
        "  fc1:output: never called: the model was not called; call it in the `with` block\n"
        "  fc1.weight: never called: no call began while the capture was open; "
        "call the model in the `with` block"
    ]
    assert len(got) == 0


def test_container_met_by_a_pattern_is_in_the_report_but_no_surprise() -> None:
    model = Partly()
    got, told = run(model, "layers", "layers.0", step=lambda: model(torch.ones(1, 3)))
    assert "layers:output: never called: a container: it is never called itself" in told[0]
    model.unused = nn.Identity()
    model.bypassed = nn.Identity()
    got, told = run(model, "layer*", step=lambda: model(torch.ones(1, 3)))
    assert told == []
    assert the_one(got).status == "never called"
    assert the_one(got).is_expected


def test_leaf_that_is_not_there_under_a_pattern() -> None:
    model = Wrapped(Branches())
    got, told = run(model, "inne*:output.c", step=lambda: model(torch.ones(1)))
    assert (the_one(got).status, the_one(got).reason) == (
        "no such leaf",
        "it ran, but its value has no such leaf",
    )
    assert told == []
    with pytest.raises(hl.NoSuchSite, match=r"there is no `\.c` in it"):
        run(model, "inner:output.c", step=lambda: model(torch.ones(1)))


def test_filters_that_never_held_are_named() -> None:
    model = Twice()
    got, told = run(model, "fc", step=lambda: model(torch.ones(1, 3)), visits=7, calls=[3])
    assert the_one(got).reason == (
        "it ran, but never in the visits or calls asked for (visits=7, calls=[3])"
    )
    assert "count them with hl.sites(model, example=x)" in told[0]


def test_module_that_raised_never_returned() -> None:
    net = Net()

    def fail() -> None:
        with pytest.raises(RuntimeError, match="mat1"):
            net(torch.ones(1, 9))

    got, _ = run(net, "fc1", step=fail)
    assert the_one(got).status == "never returned"


GRADIENT_REASONS = {
    "no backward reached a captured site inside the `with` block": lambda net: net(
        torch.ones(1, 3)
    ),
    "it ran under torch.no_grad() or inference_mode": lambda net: torch.no_grad()(net)(
        torch.ones(1, 3)
    ),
    "the backward did not reach it: the loss does not depend on it, or it was detached": (
        lambda net: net.fc2(net(torch.ones(1, 3)).detach() @ torch.ones(2, 4)).sum().backward()
    ),
}


@pytest.mark.parametrize("reason", GRADIENT_REASONS)
def test_missing_gradient_has_its_reason(reason: str) -> None:
    net = Net()
    got, told = run(net, "fc1", "fc2", step=lambda: GRADIENT_REASONS[reason](net), grads=True)
    problem = next(one for one in got.report().problems if one.address == "fc1:output.grad")
    assert (problem.status, problem.reason) == ("no gradient", reason)
    assert f"  fc1:output.grad: no gradient: {reason}; {problem.fix}" in told[0]


def test_tensor_that_needs_no_gradient_is_told_where_it_was_named() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 3))

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()

    got, told = run(model, "0", step=step, grads=True)
    assert the_one(got).reason == (
        "nothing it was computed from requires grad (frozen, data or integers)"
    )
    assert len(told) == 1
    got, told = run(model, "*", step=step, grads=True)
    assert the_one(got).is_expected
    assert told == []


def test_parameter_gradients_have_their_reasons() -> None:
    net = Net()
    net.fc1.weight.requires_grad_(False)

    def step() -> None:
        net(torch.ones(1, 3))[0, 0].backward()

    got, told = run(net, "fc1.weight:grad", "fc1.bias:grad", step=step)
    assert the_one(got).address == "fc1.weight:grad"
    assert (
        "fc1.weight:grad: no gradient: it is frozen (requires_grad=False); unfreeze it" in told[0]
    )
    got, _ = run(net, "fc1.bias:grad", step=lambda: net(torch.ones(1, 3)))
    assert the_one(got).reason == "no backward reached a captured site inside the `with` block"

    def grad_only() -> None:
        torch.autograd.grad(net(torch.ones(1, 3)).sum(), net.fc1.bias)

    got, _ = run(net, "fc2", "fc1.bias:grad", step=grad_only, grads=True)
    assert the_one(got).reason.startswith("no `.grad` was filled: the loss does not depend on it")


def test_value_and_gradient_of_a_module_that_never_ran_are_one_problem() -> None:
    model = Partly()

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()

    got, _ = run(model, "unused", step=step, grads=True)
    assert [one.address for one in got.report().problems] == ["unused:output"]
    got, _ = run(model, "unused:output.grad", step=step)
    assert [one.address for one in got.report().problems] == ["unused:output.grad"]


def test_long_warning_is_cut() -> None:
    model = nn.ModuleDict({f"m{n}": nn.Linear(1, 1) for n in range(11)})
    got, told = run(model, "*", step=lambda: model["m0"](torch.ones(1, 1)))
    lines = told[0].splitlines()
    assert len(lines) == 1 + 8 + 1
    assert lines[-1] == "  and 2 more: see got.report()"
    assert len(got.report().problems) == 10


def test_report_is_a_table_of_what_is_missing() -> None:
    model = Partly()
    got, _ = run(model, "used", "unused", step=lambda: model(torch.ones(1, 3)))
    report = got.report()
    assert report.table().title == "1 of 2 sites captured"
    assert [row["site"] for row in report.table()] == ["unused:output"]
    assert str(report) == repr(report)
    assert "unused:output: never called: the model ran without calling it" in str(report)
    assert "unused:output" in report._repr_html_()
    assert report.why("used") == ""


def test_part_of_a_nested_output_without_gradient_is_named() -> None:
    """The report has it; no warning, because few use all that an LSTM returns."""
    model = nn.Sequential(nn.LSTM(3, 2))
    with hl.capture(model, "0", grads=True) as got:
        out, (_, cell) = model(torch.randn(4, 1, 3))
        (out.sum() + cell.sum()).backward()
    assert [one.address for one in got.report().problems] == ["0:output[1][0].grad"]
