"""What a hook returns is checked before it enters the model, and the error says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

BAD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "shape": (lambda g: torch.zeros(7), r"shape \(7,\) for \(2, 3\)"),
    "broadcastable": (lambda g: torch.zeros(1), r"shape \(1,\) for \(2, 3\)"),
    "too big": (lambda g: torch.ones(4, 2, 3), r"shape \(4, 2, 3\) for \(2, 3\)"),
    "float": (lambda g: 1.0, "returned a float for a tensor"),
    "bool": (lambda g: False, "returned a bool for a tensor"),
    "dtype": (lambda g: g.double(), "returned torch.float64 for torch.float32"),
    "sparse": (lambda g: g.to_sparse(), "returned layout torch.sparse_coo for torch.strided"),
}


def _net() -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3, requires_grad=True)


@pytest.mark.parametrize("name", BAD)
def test_backward_hook_names_the_site_and_the_difference(name: str) -> None:
    """Torch lets some of these through and fails far away for the others."""
    make, message = BAD[name]
    model, x = _net()
    hl.register_backward_hook(model, "0", lambda m, gi, go: (make(gi[0]),))
    with pytest.raises(hl.EditError, match=message) as caught:
        model(x).sum().backward()
    assert "`0:input.grad`" in str(caught.value)
    assert x.grad is None


@pytest.mark.parametrize("port", ["input", "output"])
@pytest.mark.parametrize("name", BAD)
def test_gradient_edit_names_the_site_and_the_difference(name: str, port: str) -> None:
    make, message = BAD[name]
    model, x = _net()
    hl.hook(model, f"0:{port}.grad", lambda grad, at: make(grad), edit=True)
    with pytest.raises(hl.EditError, match=message) as caught:
        model(x).sum().backward()
    assert f"`0:{port}" in str(caught.value)
    assert x.grad is None


@pytest.mark.parametrize("name", BAD)
def test_value_edit_names_the_site_and_the_difference(name: str) -> None:
    make, message = BAD[name]
    model, x = _net()
    hl.hook(model, "0", lambda value, at: make(value), edit=True)
    with pytest.raises(hl.EditError, match=message):
        model(x)


@pytest.mark.parametrize("name", BAD)
def test_tensor_hook_names_the_tensor_and_the_difference(name: str) -> None:
    make, message = BAD[name]
    x = torch.ones(2, 3, requires_grad=True)
    y = x * 2
    hl.register_hook(y, make)
    with pytest.raises(hl.EditError, match=message) as caught:
        y.sum().backward()
    assert "shape (2, 3)" in str(caught.value)
    assert x.grad is None


def _wrap(kind: type | None, grad: Tensor) -> Any:
    return grad if kind is None else kind([grad])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", [None, tuple, list])
def test_tensor_tuple_and_list_mean_the_same(kind: type | None, batch: int) -> None:
    """Torch takes a tensor for a sequence of as many gradients as it has rows."""
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.ones(batch, 3, requires_grad=True)
    hl.register_backward_hook(model, "0", lambda m, gi, go: _wrap(kind, gi[0] * 2))
    model(x).sum().backward()
    assert torch.equal(x.grad, model[0].weight.detach().sum(0).expand(batch, 3) * 2)


def test_wrong_number_of_gradients_is_refused() -> None:
    model, x = _net()
    hl.register_backward_hook(model, "0", lambda m, gi, go: (gi[0], gi[0]))
    with pytest.raises(hl.EditError, match="2 gradients for 1"):
        model(x).sum().backward()


def test_gradient_for_an_input_without_one_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    hl.register_backward_hook(model, "0", lambda m, gi, go: (torch.ones(2, 3),))
    with pytest.raises(hl.EditError, match="none of the module's inputs requires one"):
        model(torch.ones(2, 3)).sum().backward()


def test_edit_that_returns_nothing_is_refused() -> None:
    """Torch's hooks read None as `keep`, so a forgotten return goes unseen."""
    model, x = _net()
    hl.hook(model, "0", lambda value, at: None, edit=True)
    with pytest.raises(hl.EditError, match=r"hl\.KEEP"):
        model(x)


def test_observers_return_is_ignored() -> None:
    """`store.setdefault(name, output)` as a hook makes torch return the first output for ever."""
    model, x = _net()
    expected = model(x)
    hl.hook(model, "0", lambda value, at: torch.zeros(2, 3))
    hl.hook(model, "0:output.grad", lambda grad, at: grad * 100)
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, model[0].weight.detach().sum(0).expand(2, 3))


def test_gradients_of_several_tensors_can_be_changed_together() -> None:
    """The return of torch's multi-grad hook is ignored."""

    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x * 1, y * 1

    module = Two()
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    hl.register_backward_pre_hook(module, "", lambda m, go: (go[0] * 100, go[0] + go[1]))
    a, b = module(x, y)
    (a + 3 * b).sum().backward()
    assert x.grad.tolist() == [100.0, 100.0]
    assert y.grad.tolist() == [4.0, 4.0]


def test_gradient_set_to_none_stops_there() -> None:
    model, x = _net()
    hl.register_backward_hook(model, "0", lambda m, gi, go: (None,))
    model(x).sum().backward()
    assert x.grad is None
    assert model[0].weight.grad is not None


def test_tensor_without_a_gradient_is_refused_with_a_reason() -> None:
    """Torch says `AssertionError`, or that the tensor does not require gradient."""
    with pytest.raises(hl.GradientError, match="nothing it was made from requires one"):
        hl.register_hook(torch.ones(2), lambda grad: None)
