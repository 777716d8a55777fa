"""An edit inside a checkpointed region is repeated when the region runs again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_checkpointed_values import KINDS, RUNS, Model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")

EDITS: dict[str, Callable[[], dict[str, Any]]] = {
    "scale": lambda: {"middle.0": hl.scale(2)},
    "add": lambda: {"middle.0": hl.add(1)},
    "noise": lambda: {"middle.0": hl.noise(0.5, seed=7), "middle.3": hl.noise(0.5)},
    "input": lambda: {"middle.2:input.input": hl.scale(-1)},
    "before": lambda: {"first": hl.scale(3)},
    "function": lambda: {"middle.3": lambda value, at: value.tanh()},
    "skip": lambda: {"middle.2": hl.skip(lambda at: at.inputs["input"] * 0.5)},
    "first visit": lambda: {"middle.0": hl.scale(2).where(visits=0)},
    "other visit": lambda: {"middle.0": hl.scale(2), "middle.3": hl.scale(9).where(visits=[1, 2])},
    "this call": lambda: {"middle.0": hl.scale(2).where(calls=0)},
    "gradient": lambda: {"middle.2:output.grad": hl.scale(3)},
    "weight": lambda: {"middle.0.weight": hl.scale(2)},
}
MISSED = {"other visit"}


def _step(run: Any, edits: dict[str, Any], *, is_open: bool, is_missed: bool) -> list[Tensor]:
    torch.manual_seed(5)
    model = Model(run)
    x = torch.randn(3, 2)
    handle = hl.edit(model, edits)
    out = model(x)
    if not is_open:
        handle.remove()
    out.square().sum().backward()
    handle.remove()
    assert any(row["applied"] == 0 for row in handle.report()) is is_missed
    results = [out.detach(), *(one.grad for one in model.parameters()), torch.rand(1)]
    del out
    gc.collect()
    assert _is_clean(model)
    return results


def _is_clean(model: nn.Module) -> bool:
    return not any(
        one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one)
        for one in model.modules()
    )


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("edit", EDITS)
def test_edit_under_checkpoint_equals_the_same_edit_without(name: str, edit: str) -> None:
    missed = edit in MISSED
    plain = _step(None, EDITS[edit](), is_open=True, is_missed=missed)
    again = _step(RUNS[name], EDITS[edit](), is_open=True, is_missed=missed)
    for before, after in zip(plain, again, strict=True):
        torch.testing.assert_close(after, before)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("edit", sorted(EDITS.keys() - {"gradient", "weight"}))
def test_edit_removed_before_backward_is_still_repeated(name: str, edit: str) -> None:
    """Without it the gradient would be another function's, and nothing would say so."""
    missed = edit in MISSED
    plain = _step(None, EDITS[edit](), is_open=True, is_missed=missed)
    again = _step(RUNS[name], EDITS[edit](), is_open=False, is_missed=missed)
    for before, after in zip(plain, again, strict=True):
        torch.testing.assert_close(after, before)


@pytest.mark.parametrize("is_reentrant", KINDS)
def test_edit_limited_to_a_visit_is_repeated_in_that_visit_only(is_reentrant: bool) -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, run: Callable[..., Any]) -> Tensor:
            return run(lambda t: self.layer(self.layer(self.layer(t).tanh()).tanh()).tanh(), x)

    model = Thrice()
    x = torch.randn(1, 2, requires_grad=True)

    def gradient(run: Callable[..., Any], is_open: bool) -> Tensor:
        x.grad = None
        handle = hl.edit(model, {"layer": hl.scale(4)}, visits=1, calls=1)
        model(x, lambda function, t: function(t))  # call 0, unedited
        out = model(x, run)
        if not is_open:
            handle.remove()
        out.sum().backward()
        handle.remove()
        return x.grad.clone()

    plain = gradient(lambda function, t: function(t), True)
    for is_open in (True, False):
        again = gradient(partial(checkpoint, use_reentrant=is_reentrant), is_open)
        torch.testing.assert_close(again, plain)


@pytest.mark.parametrize("is_reentrant", KINDS)
def test_lingering_edit_does_not_touch_later_calls(is_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.randn(1, 2, requires_grad=True)
    plain = model(x)
    with hl.edit(model, {"0": hl.scale(2)}):
        out = checkpoint(model, x, use_reentrant=is_reentrant)
    assert torch.equal(model(x), plain)  # removed at once for every new call
    with hl.capture(model, "0") as got:
        model(x)
    assert torch.equal(got["0"].output.tanh(), plain)
    out.sum().backward()
    torch.testing.assert_close(x.grad, (2 * (1 - out.detach() ** 2)) @ model[0].weight)
    del out
    assert _is_clean(model)


@pytest.mark.parametrize("is_reentrant", KINDS)
@pytest.mark.parametrize("action", [hl.scale(2), hl.skip(lambda at: at.inputs["input"])])
def test_graph_dropped_without_backward_releases_the_edit(is_reentrant: bool, action: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.randn(1, 2, requires_grad=True)
    with hl.edit(model, {"1": action}):
        out = checkpoint(model, x, use_reentrant=is_reentrant)
    assert not _is_clean(model)  # waiting for a backward
    del out
    gc.collect()
    assert _is_clean(model)


def test_observer_leaves_at_once_even_in_a_region() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.randn(1, 2, requires_grad=True)
    with hl.hook(model, "**", lambda value, at: None), hl.capture(model, "**"):
        out = checkpoint(model, x, use_reentrant=False)
    assert _is_clean(model)
    out.sum().backward()


def test_capture_inside_an_edit_under_checkpoint_holds_edited_values_and_gradients() -> None:
    for is_reentrant in KINDS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        x = torch.randn(1, 2, requires_grad=True)
        with hl.edit(model, {"0": hl.scale(2)}), hl.capture(model, "0", grads=True) as got:
            out = checkpoint(model, x, use_reentrant=is_reentrant)
            out.sum().backward()
        assert torch.equal(got["0"].output, 2 * model[0](x))
        torch.testing.assert_close(got["0:output.grad"], 1 - out.detach() ** 2)


def test_own_random_edit_under_checkpoint_sees_the_same_numbers() -> None:
    """A user's own `torch.randn` in an edit is covered by checkpoint's own random state."""
    for is_reentrant in KINDS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        x = torch.randn(1, 2, requires_grad=True)
        drawn: list[Tensor] = []

        def shake(value: Tensor, at: hl.At, into: list[Tensor] = drawn) -> Tensor:
            into.append(torch.randn(value.shape))
            return value * into[-1]

        with hl.edit(model, {"0": shake}):
            checkpoint(model, x, use_reentrant=is_reentrant).sum().backward()
        assert len(drawn) == 2
        assert torch.equal(drawn[0], drawn[1])


def test_backward_hook_edit_inside_a_region_is_applied_once() -> None:
    for is_reentrant in KINDS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        x = torch.randn(1, 2, requires_grad=True)
        (plain,) = torch.autograd.grad(model(x).sum(), x)
        hook = hl.register_backward_hook(model, "0", lambda m, i, o: (i[0] * 10,))
        with hook:
            checkpoint(model, x, use_reentrant=is_reentrant).sum().backward()
        torch.testing.assert_close(x.grad, plain * 10)


@pytest.mark.parametrize("is_reentrant", KINDS)
def test_two_gradient_edits_at_one_site_are_both_applied_in_a_region(is_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.randn(1, 2, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    edits = [("0:output.grad", hl.scale(2)), ("0:output.grad", hl.scale(5))]
    with hl.edit(model, edits):
        checkpoint(model, x, use_reentrant=is_reentrant).sum().backward()
    torch.testing.assert_close(x.grad, plain * 10)


def test_forward_hook_of_torchs_kind_is_repeated_too() -> None:
    for is_reentrant in KINDS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        x = torch.randn(1, 2, requires_grad=True)
        (plain,) = torch.autograd.grad((model[0](x) * 3).tanh().sum(), x)
        with hl.register_forward_hook(model, "0", lambda m, i, o: o * 3):
            out = checkpoint(model, x, use_reentrant=is_reentrant)
        out.sum().backward()
        torch.testing.assert_close(x.grad, plain)


@pytest.mark.parametrize("is_reentrant", KINDS)
def test_edit_under_checkpoint_of_the_whole_model_in_inference_needs_no_backward(
    is_reentrant: bool,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with torch.no_grad(), hl.edit(model, {"0": hl.zero()}):
        out = checkpoint(model, torch.ones(1, 2), use_reentrant=is_reentrant)
    assert torch.equal(out, torch.zeros(1, 2))
    gc.collect()
    assert _is_clean(model)
