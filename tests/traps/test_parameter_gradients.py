"""Gradients of parameters: this pass's and the accumulated one, each by its own name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


def test_tensor_hook_sees_this_pass_and_the_site_sees_the_accumulated_gradient() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    weight = model[0].weight
    weight.grad = torch.full((1, 1), 100.0)
    seen: dict[str, float] = {}
    hl.register_hook(weight, lambda grad: seen.update(this_pass=grad.item()))
    hl.hook(model, "0.weight:grad", lambda grad, at: seen.update(accumulated=grad.item()))
    (weight * 2 + weight * 3).sum().backward()
    assert seen == {"this_pass": 5.0, "accumulated": 105.0}


def test_autograd_grad_reaches_sites_and_tensor_hooks_but_accumulates_nothing() -> None:
    """Which of torch's hooks fire depends on what `autograd.grad` was asked for."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    seen: list[str] = []
    hl.hook(model, "0:output.grad", lambda grad, at: seen.append("output"))
    hl.hook(model, "1:input.grad", lambda grad, at: seen.append("input"))
    hl.hook(model, "0.weight:grad", lambda grad, at: seen.append("accumulated"))
    hl.register_hook(model[0].weight, lambda grad: seen.append("weight"))
    outputs: list[Tensor] = []
    model[0].register_forward_hook(lambda m, args, output: outputs.append(output))
    loss = model(torch.ones(1, 2)).sum()
    torch.autograd.grad(loss, model[0].weight, retain_graph=True)
    assert seen == ["input", "output", "weight"]
    seen.clear()
    torch.autograd.grad(loss, outputs[0])
    assert seen == ["input", "output"]


def test_nothing_has_to_be_kept_alive_for_a_parameter_hook() -> None:
    """A torch hook on the accumulating node dies with the last reference to that node."""
    model = nn.Sequential(nn.Linear(2, 2))
    seen: list[Tensor] = []
    hl.hook(model, "0.weight:grad", lambda grad, at: seen.append(grad.clone()))
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 3
    assert all(torch.equal(grad, torch.ones(2, 2)) for grad in seen)


def test_edit_of_an_accumulated_gradient_replaces_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.edit(model, {"0.weight:grad": hl.scale(10)}):
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model[0].weight.grad, torch.full((2, 2), 10.0))
    assert torch.equal(model[0].bias.grad, torch.ones(2))


def test_captured_parameter_gradient_survives_zero_grad_and_clipping() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.capture(model, "0.weight:grad") as got:
        model(torch.ones(1, 2)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        model.zero_grad(set_to_none=False)
    assert torch.equal(got["0.weight:grad"], torch.ones(2, 2))


def test_captured_output_gradient_survives_what_is_done_to_a_leafs_grad() -> None:
    """Autograd hands a gradient on to `.grad` without a copy where nobody else owns it."""
    model = nn.Sequential(nn.Identity())
    leaf = torch.ones(2, requires_grad=True)
    with hl.capture(model, "0", "0:input", grads=True) as got:
        (model(leaf) * 3).sum().backward()
        leaf.grad.mul_(100)
        (model(leaf) * 4).sum().backward()
    assert got.calls[0]["0:output.grad"].tolist() == [3.0, 3.0]
    assert got.calls[0]["0:input.input.grad"].tolist() == [3.0, 3.0]
    assert got.calls[1]["0:output.grad"].tolist() == [4.0, 4.0]
    assert leaf.grad.tolist() == [304.0, 304.0]


def test_shared_parameter_has_one_gradient_under_both_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    seen: list[Any] = []
    hl.hook(model, "0.weight:grad", lambda grad, at: seen.append(("0", grad.clone())))
    hl.hook(model, "1.weight:grad", lambda grad, at: seen.append(("1", grad.clone())))
    model(torch.ones(1, 2)).sum().backward()
    assert [name for name, _ in seen] == ["0", "1"]
    assert all(torch.equal(grad, model[0].weight.grad) for _, grad in seen)


def test_sparse_embedding_gradient_is_captured_and_accumulated_as_it_is() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    with hl.capture(model, "0", "0.weight:grad", grads=True) as got:
        model(torch.tensor([1, 1, 3])).sum().backward()
    assert got["0.weight:grad"].is_sparse
    assert torch.equal(got["0.weight:grad"].to_dense(), model[0].weight.grad.to_dense())
    assert torch.equal(got["0:output.grad"], torch.ones(3, 2))


def test_sparse_embedding_gradient_can_be_observed_and_edited() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    seen: list[Tensor] = []
    hl.hook(model, "0.weight:grad", lambda grad, at: grad * 2, edit=True)
    hl.hook(model, "0.weight:grad", lambda grad, at: seen.append(grad))
    model(torch.tensor([1])).sum().backward()
    assert model[0].weight.grad.is_sparse
    assert model[0].weight.grad.to_dense()[1].tolist() == [2.0, 2.0]
    assert seen[0].to_dense()[1].tolist() == [2.0, 2.0]


def test_dense_gradient_for_a_sparse_one_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    hl.hook(model, "0.weight:grad", lambda grad, at: grad.to_dense(), edit=True)
    with pytest.raises(hl.EditError, match="layout"):
        model(torch.tensor([1])).sum().backward()


def test_gradient_reaches_the_parameter_while_its_value_is_edited() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    weight = model[0].weight
    with (
        hl.capture(model, "0.weight:grad") as early,
        hl.edit(model, {"0.weight": hl.scale(3)}),
    ):
        model(torch.ones(1, 2)).sum().backward()
        with hl.capture(model, "0.weight:grad") as late:
            model(torch.ones(1, 2)).sum().backward()
    assert model[0].weight is weight
    assert torch.equal(early.calls[0]["0.weight:grad"], torch.full((2, 2), 3.0))
    assert torch.equal(late["0.weight:grad"], torch.full((2, 2), 6.0))


def test_weight_decay_like_edit_sees_the_parameter_it_belongs_to() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))

    def decay(grad: Tensor, at: hl.At) -> Tensor:
        return grad + 0.5 * at.module.weight.detach()

    with hl.edit(model, {"0.weight:grad": decay}):
        model(torch.ones(1, 2)).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, 1 + 0.5 * model[0].weight.detach())
