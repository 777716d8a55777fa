"""A backward hook on `Linear(10, 20)` that answers with ones: `a.grad` is ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

PRINTED = """\
tensor([[1., 1., 1., 1., 1., 1., 1., 1., 1., 1.],
        [1., 1., 1., 1., 1., 1., 1., 1., 1., 1.],
        [1., 1., 1., 1., 1., 1., 1., 1., 1., 1.]])"""


def answer_ones(module: nn.Module, grad_in: tuple[Tensor], grad_out: tuple[Tensor]) -> object:
    return tuple(torch.ones_like(grad) for grad in grad_in)


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(10, 20)


@pytest.fixture
def a() -> Tensor:
    return torch.randn(3, 10, requires_grad=True)


def test_returned_ones_become_the_input_gradient(linear: nn.Linear, a: Tensor) -> None:
    hl.register_backward_hook(linear, "", answer_ones)
    linear(a).sum().backward()
    assert str(a.grad) == PRINTED


def test_same_as_an_edit_of_the_address(linear: nn.Linear, a: Tensor) -> None:
    with hl.edit(linear, {":input.input.grad": hl.set(1.0)}):
        linear(a).sum().backward()
    assert str(a.grad) == PRINTED


def test_parameters_keep_their_own_gradients(linear: nn.Linear, a: Tensor) -> None:
    """Only what the layer sends on is replaced; torch alone gives the rest."""
    linear(a).sum().backward()
    expected = [parameter.grad.clone() for parameter in linear.parameters()]
    linear.zero_grad()
    with hl.register_backward_hook(linear, "", answer_ones):
        linear(a).sum().backward()
    for parameter, grad in zip(linear.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_hook_reads_the_gradients_torch_computes(linear: nn.Linear, a: Tensor) -> None:
    seen = []
    with hl.register_backward_hook(linear, "", lambda _, grad_in, grad_out: seen.append(grad_in)):
        linear(a).sum().backward()
    [(grad_in,)] = seen
    torch.testing.assert_close(grad_in, linear.weight.detach().sum(0).expand(3, 10))
    assert torch.equal(grad_in, a.grad)


def test_a_layer_before_it_sees_the_ones(a: Tensor) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 20))
    with (
        hl.register_backward_hook(model, "1", answer_ones),
        hl.capture(model, "0", grads=True) as got,
    ):
        model(a).sum().backward()
    assert torch.equal(got["0:output.grad"], torch.ones(3, 10))
