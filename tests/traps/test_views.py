"""Views and slices: hooks on them are neither lost, nor late, nor a crash."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tricky_modules import Calling

import hookline as hl


def test_tensor_hook_belongs_to_the_value_it_was_put_on() -> None:
    """As in torch: registered before `mul_(2)` it sees 10, after it 5."""
    a = torch.tensor([1.0], requires_grad=True).clone()
    seen: dict[str, float] = {}
    hl.register_hook(a, lambda grad: seen.update(before=grad.item()))
    a.mul_(2)
    hl.register_hook(a, lambda grad: seen.update(after=grad.item()))
    (a * 5).sum().backward()
    assert seen == {"before": 10.0, "after": 5.0}


def test_captured_gradient_belongs_to_the_value_at_the_site() -> None:
    """`retain_grad` moves on with in-place changes; the gradient at a site does not."""
    module = Calling(lambda m, x: x * 1)
    x = torch.ones(1, requires_grad=True)
    with hl.capture(module, "", grads=True, clone=True) as got:
        y = module(x)
        y.mul_(2)
        (y * 5).sum().backward()
    assert got[""].output.item() == 1.0
    assert got[":output.grad"].item() == 10.0


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.view(2, 2),
        lambda y: y[1:],
        lambda y: y.view(2, 2).t(),
        lambda y: y.unsqueeze(0),
        lambda y: y.diagonal(0) if y.dim() > 1 else y.as_strided((2,), (2,)),
    ],
    ids=["view", "slice", "transpose", "unsqueeze", "as_strided"],
)
def test_returned_view_changed_in_place_keeps_its_hook(view: Any) -> None:
    """Torch drops a tensor hook on a view that is changed in place, in silence."""
    module = Calling(lambda m, x: view(x * 2))
    x = torch.randn(4, requires_grad=True)
    seen: list[Tensor] = []
    hl.hook(module, ":output.grad", lambda grad, at: seen.append(grad))
    y = module(x)
    before = y.detach().clone()
    y.relu_().sum().backward()
    assert torch.equal(seen[0], (before > 0).float())
    plain = x.detach().clone().requires_grad_()
    view(plain * 2).relu_().sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_tensor_hook_on_a_view_changed_in_place_raises_instead_of_vanishing() -> None:
    x = torch.randn(4, requires_grad=True)
    y = (x * 2).view(2, 2)
    seen: list[Tensor] = []
    hl.register_hook(y, seen.append)
    z = y.relu_()
    with pytest.raises(hl.GradientError, match="was lost"):
        z.sum().backward()
    assert seen == []


def test_tensor_hook_on_a_view_left_alone_fires() -> None:
    x = torch.randn(4, requires_grad=True)
    y = (x * 2).view(2, 2)
    seen: list[Tensor] = []
    hl.register_hook(y, seen.append)
    (y * 3).sum().backward()
    assert torch.equal(seen[0], torch.full((2, 2), 3.0))


def test_part_of_an_output_is_selected_by_the_capture() -> None:
    """A torch hook on `output[:, 0]` never fires: that view is in nobody's graph."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with hl.capture(model, "0", grads=True, select=(slice(None), 0)) as got:
        y = model(torch.ones(2, 3))
        y.sum().backward()
    assert got["0"].output.shape == (2,)
    torch.testing.assert_close(got["0:output.grad"], (1 - y.detach() ** 2)[:, 0])


def test_part_of_a_gradient_is_edited_under_a_condition() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.ones(2, 3, requires_grad=True)
    with hl.edit(model, {"0:output.grad": hl.zero().where(rows=0)}):
        model(x).sum().backward()
    assert torch.equal(x.grad[0], torch.zeros(3))
    torch.testing.assert_close(x.grad[1], model[0].weight.detach().sum(0))


def test_row_of_a_weight_is_a_part_of_its_gradient() -> None:
    """A torch hook on `weight[0]` never fires either."""
    model = nn.Sequential(nn.Linear(3, 3))
    seen: list[Tensor] = []
    hl.hook(model, "0.weight:grad", lambda grad, at: seen.append(grad[0].clone()))
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(seen[0], model[0].weight.grad[0])


STALE = """
import torch, hookline as hl
from torch import nn

class Stale(nn.Module):
    def forward(self, x):
        y = x.clone().view(2)
        y[:].add_(1)
        return y

seen = []
x = torch.ones(2, requires_grad=True)
{attach}
print(len(seen), x.grad.tolist())
"""


@pytest.mark.parametrize(
    "attach",
    [
        "y = Stale()(x); hl.register_hook(y, seen.append); y.sum().backward()",
        "m = Stale(); hl.hook(m, ':output.grad', lambda g, at: seen.append(g)); "
        "m(x).sum().backward()",
        "m = Stale(); hl.register_backward_hook(m, '', lambda *a: seen.append(a)); "
        "m(x).sum().backward()",
        "m = nn.Sequential(Stale(), nn.Tanh()); "
        "hl.hook(m, '1:input.grad', lambda g, at: seen.append(g)); m[1](m[0](x)); "
        "m[0](x).sum().backward(); seen.append(1)",
    ],
    ids=["tensor", "output", "module", "input"],
)
def test_view_changed_through_another_alias_does_not_crash(attach: str) -> None:
    """Torch's `register_hook` on such a view ends the process with a segmentation fault."""
    ran = subprocess.run(
        [sys.executable, "-c", STALE.format(attach=attach)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "1 [1.0, 1.0]"


def test_expanded_output_has_the_gradient_of_its_full_shape() -> None:
    module = Calling(lambda m, x: x.sum().expand(3))
    x = torch.ones(2, requires_grad=True)
    with hl.capture(module, "", grads=True) as got:
        (module(x) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert got[":output.grad"].tolist() == [1.0, 2.0, 3.0]
    assert x.grad.tolist() == [6.0, 6.0]


def test_split_outputs_have_a_gradient_each() -> None:
    module = Calling(lambda m, x: (x * 2).split(2))
    x = torch.ones(4, requires_grad=True)
    with hl.capture(module, "", grads=True) as got:
        a, b = module(x)
        (a * 3 + b * 5).sum().backward()
    assert got[":output[0].grad"].tolist() == [3.0, 3.0]
    assert got[":output[1].grad"].tolist() == [5.0, 5.0]
    assert x.grad.tolist() == [6.0, 6.0, 10.0, 10.0]


def test_output_and_a_view_of_it_do_not_share_a_gradient() -> None:
    def both(_: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[0]

    module = Calling(both)
    x = torch.ones(2, requires_grad=True)
    with hl.capture(module, "", grads=True) as got:
        y, first = module(x)
        ((y * 3).sum() + first * 7).backward()
    assert got[":output[1].grad"].item() == 7.0
    assert x.grad.tolist() == [20.0, 6.0]
    # What reaches the first output through the second is part of its gradient, as in torch.
    assert got[":output[0].grad"].tolist() == [10.0, 3.0]
