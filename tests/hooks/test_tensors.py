"""`hl.register_hook`: torch's own call on one tensor, without its silent losses."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from small_models import same
from torch import Tensor, nn

import hookline as hl


def test_gradient_is_that_of_torch_and_a_return_replaces_it() -> None:
    x = torch.randn(3, requires_grad=True)
    y, seen = x * 2, []
    hl.register_hook(y, lambda grad: seen.append(grad.clone()))
    hl.register_hook(y, lambda grad: grad * 10)
    (y * torch.arange(3.0)).sum().backward()
    assert same(seen[0], torch.arange(3.0))
    assert same(x.grad, 20 * torch.arange(3.0))


def test_hooks_run_in_order_and_each_sees_the_last_ones_return() -> None:
    x, seen = torch.ones(1, requires_grad=True), []
    for factor in (2, 3):
        hl.register_hook(x, lambda grad, f=factor: seen.append(grad.item()) or grad * f)
    (x * 1).sum().backward()
    assert seen == [1, 2]
    assert x.grad.item() == 6


def test_removal_is_at_once_and_idempotent() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    handle = hl.register_hook(y, lambda grad: grad * 0)
    loss = y.sum()
    handle.remove()
    handle.remove()
    loss.backward()
    assert x.grad.item() == 2
    assert not y._backward_hooks


def test_handle_is_a_context_manager() -> None:
    x = torch.ones(1, requires_grad=True)
    with hl.register_hook(x, lambda grad: grad * 5):
        (x * 1).sum().backward()
    (x * 1).sum().backward()
    assert x.grad.item() == 6


def test_intermediate_tensor_of_a_graph_is_as_good_as_a_leaf() -> None:
    x = torch.randn(2, requires_grad=True)
    h = x.tanh()
    seen: list[Tensor] = []
    hl.register_hook(h, seen.append)
    h.pow(2).sum().backward()
    assert same(seen[0], 2 * h.detach())


def test_view_changed_in_place_afterwards_raises_instead_of_going_silent() -> None:
    x = torch.randn(2, 2, requires_grad=True)
    base = x * 1
    view = base[0]
    hl.register_hook(view, lambda grad: grad)
    view.mul_(2)
    with pytest.raises(hl.GradientError) as caught:
        base.sum().backward()
    assert str(caught.value) == (
        "the hook on a tensor of shape (2,) was lost: it is a view that was changed in place "
        "after hl.register_hook. Register it after the change, or on y = y.clone()."
    )


def test_view_that_is_not_part_of_the_loss_is_no_error() -> None:
    base = torch.randn(2, 2, requires_grad=True) * 1
    hl.register_hook(base[0], lambda grad: grad)
    base.sum().backward()


def test_tensor_without_gradient_is_refused() -> None:
    with pytest.raises(hl.GradientError, match="this tensor has no gradient: nothing it was made"):
        hl.register_hook(torch.ones(1), print)
    with torch.inference_mode():
        made = torch.ones(1) * 2
    with pytest.raises(hl.GradientError, match=r"Call x\.requires_grad_\(\) on an input first"):
        hl.register_hook(made, print)


def test_module_is_refused_with_the_call_that_takes_it() -> None:
    with pytest.raises(hl.UnsupportedModel) as caught:
        hl.register_hook(nn.Linear(1, 1), print)
    assert str(caught.value) == (
        "hl.register_hook takes a tensor; this is Linear. "
        "For modules there is hl.hook(model, address, fn)."
    )


def test_wrong_return_is_refused_with_the_tensors_shape() -> None:
    y = torch.ones(2, requires_grad=True) * 2
    hl.register_hook(y, lambda grad: grad[:1])
    with pytest.raises(hl.EditError) as caught:
        y.sum().backward()
    assert str(caught.value) == (
        "the edit at a tensor of shape (2,) returned shape (1,) for (2,). "
        "Return a tensor of the same shape, e.g. new.expand_as(value)."
    )


def test_error_in_the_hook_gains_a_note() -> None:
    y = torch.ones(2, 3, requires_grad=True) * 2
    hl.register_hook(y, lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        y.sum().backward()
    assert caught.value.__notes__ == ["in a hl.register_hook of a tensor of shape (2, 3)"]


def test_hooked_tensor_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        y = torch.ones(2, requires_grad=True) * 2
        handle = hl.register_hook(y, lambda grad: grad)
        alive = weakref.ref(y)
        del y
        assert alive() is None
        handle.remove()
    finally:
        gc.enable()
