"""Several backward passes: through one graph twice, through the gradient's own graph, in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tricky_modules import Calling

import hookline as hl


def _cube() -> tuple[nn.Module, Tensor]:
    """Cube what `0` gives: the gradient there is 3 * 2**2, of which the gradient is 6 * 2."""
    model = nn.Sequential(Calling(lambda m, x: x * 1), Calling(lambda m, x: x**3))
    return model, torch.tensor(2.0, requires_grad=True)


def test_two_backwards_of_one_forward_are_told_apart() -> None:
    """Torch's hook fires twice, and nothing says which pass it is."""
    model = nn.Linear(2, 2)
    with hl.capture(model, "", ":input", grads=True) as got:
        y = model(torch.ones(1, 2, requires_grad=True))
        y.sum().backward(retain_graph=True)
        (y.sum() * 3).backward()
    assert [g.tolist() for g in got[""].grads()] == [[[1.0, 1.0]], [[3.0, 3.0]]]
    assert got[":output.grad"].tolist() == [[4.0, 4.0]]
    assert got[""].output.grad.tolist() == [[4.0, 4.0]]
    first, second = got[""].grads("input")
    torch.testing.assert_close(second["input"], first["input"] * 3)


def test_read_between_two_backwards_does_not_change_afterwards() -> None:
    model = nn.Linear(2, 2)
    with hl.capture(model, "", grads=True) as got:
        y = model(torch.ones(1, 2))
        y.sum().backward(retain_graph=True)
        early = got[":output.grad"]
        kept = early.clone()
        y.sum().backward()
    assert torch.equal(early, kept)
    assert torch.equal(got[":output.grad"], kept * 2)


def test_backward_hook_fires_once_for_each_pass() -> None:
    model, seen = nn.Linear(2, 2), []
    hl.register_backward_hook(model, "", lambda m, gi, go: seen.append((gi[0], go[0])))
    x = torch.ones(1, 2, requires_grad=True)
    y = model(x)
    y.sum().backward(retain_graph=True)
    (y.sum() * 2).backward()
    assert len(seen) == 2
    assert torch.equal(seen[1][0], seen[0][0] * 2)
    assert torch.equal(seen[1][1], seen[0][1] * 2)


def test_zero_grad_between_backwards_does_not_touch_what_was_captured() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    x = torch.ones(1, 2, requires_grad=True)
    with hl.capture(model, "0", "0.weight:grad", grads=True) as got:
        model(x).sum().backward()
        expected = model[0].weight.grad.clone()
        model.zero_grad(set_to_none=False)
        x.grad.zero_()
    assert torch.equal(got["0.weight:grad"], expected)
    assert got["0:output.grad"].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_of_two_steps_belong_to_their_calls(set_to_none: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    expected = []
    with hl.capture(model, "0.weight:grad", "0", grads=True) as got:
        for factor in (1, 2):
            model.zero_grad(set_to_none=set_to_none)
            (model(torch.ones(1, 2)).sum() * factor).backward()
            expected.append(model[0].weight.grad.clone())
    for call, factor, grad in zip(got.calls, (1, 2), expected, strict=True):
        assert torch.equal(call["0.weight:grad"], grad)
        assert call["0:output.grad"].tolist() == [[factor, factor]]


def test_observer_sees_first_and_second_order_and_changes_neither() -> None:
    """Torch's full backward hook is skipped in a double backward."""
    model, x = _cube()
    seen: list[float] = []
    hl.hook(model, "0:output.grad", lambda grad, at: seen.append(grad.item()))
    (first,) = torch.autograd.grad(model(x), x, create_graph=True)
    assert seen == [12.0]
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (12.0, 12.0)
    assert seen == [12.0, 12.0]


def test_gradient_edit_met_again_in_a_double_backward_raises() -> None:
    """A torch tensor hook `g * 3` is applied again: 108 where 36 is meant."""
    model, x = _cube()
    with hl.edit(model, {"0:output.grad": hl.scale(3)}):
        (first,) = torch.autograd.grad(model(x), x, create_graph=True)
        assert first.item() == 36.0
        with pytest.raises(hl.EditError, match="second_order=True"):
            torch.autograd.grad(first, x)


def test_gradient_edit_meant_for_both_orders_is_allowed() -> None:
    model, x = _cube()
    with hl.edit(model, {"0:output.grad": hl.scale(3)}, second_order=True):
        (first,) = torch.autograd.grad(model(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
    assert second.item() == 108.0


@pytest.mark.parametrize("kind", ["hook", "pre hook"])
def test_backward_hook_that_edits_raises_in_a_double_backward(kind: str) -> None:
    model, x = _cube()
    if kind == "hook":
        hl.register_backward_hook(model, "0", lambda m, gi, go: gi[0] * 3)
    else:
        hl.register_backward_pre_hook(model, "0", lambda m, go: go[0] * 3)
    (first,) = torch.autograd.grad(model(x), x, create_graph=True)
    assert first.item() == 36.0
    with pytest.raises(hl.EditError, match="create_graph=True"):
        torch.autograd.grad(first, x)


def test_backward_hook_that_only_looks_is_fine_in_a_double_backward() -> None:
    model, x = _cube()
    seen: list[Any] = []
    hl.register_backward_hook(model, "0", lambda m, gi, go: seen.append(gi[0].item()))
    (first,) = torch.autograd.grad(model(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert second.item() == 12.0
    assert seen[0] == 12.0


def test_gradient_penalty_trains_as_without_a_capture() -> None:
    def step(model: nn.Module) -> list[Tensor]:
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        y = model(x).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        (y + (grad.norm(dim=1) - 1).square().sum()).backward()
        return [p.grad.clone() for p in model.parameters()]

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    expected = step(model)
    model.zero_grad()
    with hl.capture(model, "**", grads=True) as got:
        mine = step(model)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    assert len(got["1"].grads()) == 2
    assert torch.equal(got["2"].grads()[0], torch.ones(2, 1))


def test_captured_gradient_holds_no_graph_of_its_own() -> None:
    model, x = _cube()
    with hl.capture(model, "0", grads=True) as got:
        torch.autograd.grad(model(x), x, create_graph=True)
    assert not got["0:output.grad"].requires_grad


def test_autograd_grad_of_a_weight_alone_shows_gradients_on_the_way() -> None:
    """`post_accumulate` hooks never fire there, which the report says."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with (
        pytest.warns(hl.HooklineWarning, match=r"0\.weight:grad: no gradient"),
        hl.capture(model, "1", "0.weight:grad", grads=True) as got,
    ):
        (grad,) = torch.autograd.grad(model(torch.ones(1, 2)).sum(), model[0].weight)
    assert got["1:output.grad"].tolist() == [[1.0]]
    assert model[0].weight.grad is None
    with pytest.raises(hl.NotCaptured, match=r"torch\.autograd\.grad, which fills none"):
        got["0.weight:grad"]
    assert grad.shape == (2, 2)


def test_autograd_grad_of_a_captured_output_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    outputs: list[Tensor] = []
    model[0].register_forward_hook(lambda m, args, output: outputs.append(output))
    with hl.capture(model, "0", grads=True) as got:
        y = model(torch.ones(1, 2)).sum()
        (grad,) = torch.autograd.grad(y, outputs[0])
    assert torch.equal(got["0:output.grad"], grad)


def test_autograd_grad_of_the_input_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.ones(1, 2, requires_grad=True)
    with hl.capture(model, "0:input", grads=True) as got:
        (grad,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(got["0:input.input.grad"], grad)


def test_leaf_among_the_inputs_of_autograd_grad_is_no_trouble() -> None:
    """A multi-grad hook over a leaf raises inside `autograd.grad`."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    seen: list[Any] = []
    hl.register_backward_hook(model, "**", lambda m, gi, go: seen.append(go))
    x = torch.ones(1, 2, requires_grad=True)
    found = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    assert len(found) == 5
    assert len(seen) == 3
