"""Backward hooks with torch's signatures: an entry for each input, whatever happens inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Mixer, Net, Twice, Wrapped, same
from torch import Tensor, nn

import hookline as hl


def attach(model: nn.Module, where: Any = "inner") -> list[Any]:
    """Attach a backward hook that keeps what it gets."""
    seen: list[Any] = []
    hl.register_backward_hook(model, where, lambda *given: seen.append(given))
    return seen


def test_single_operation_agrees_with_torch() -> None:
    net, x, right = Net(), torch.randn(2, 3, requires_grad=True), []
    seen = attach(net, "fc2")
    net(x).pow(2).sum().backward()
    other = Net()
    other.load_state_dict(net.state_dict())
    other.fc2.register_full_backward_hook(lambda *given: right.append(given))
    other(x).pow(2).sum().backward()
    assert seen[0][0] is net.fc2
    assert same(seen[0][1][0], right[0][1][0])
    assert same(seen[0][2][0], right[0][2][0])


def test_module_of_many_operations_has_an_entry_for_each_input() -> None:
    model = Wrapped(Mixer())
    seen = attach(model)
    x, y = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    model(x, y).sum().backward()
    (module, grad_input, grad_output) = seen[0]
    assert module is model.inner
    assert [same(mine, leaf.grad) for mine, leaf in zip(grad_input, (x, y), strict=True)] == [
        True,
        True,
    ]
    assert grad_output[0].tolist() == [1, 1]


def test_keyword_arguments_follow_the_positional_ones() -> None:
    model = Wrapped(Mixer())
    seen = attach(model)
    x, y, scale = (torch.randn(2, requires_grad=True) for _ in range(3))
    model(x, scale=scale, y=y).sum().backward()
    assert all(same(mine, leaf.grad) for mine, leaf in zip(seen[0][1], (x, scale, y), strict=True))


def test_nested_argument_has_a_nested_entry() -> None:
    model = Wrapped(Mixer())
    seen = attach(model)
    x, a, b = (torch.randn(2, requires_grad=True) for _ in range(3))
    model(x, torch.zeros(2), scale=2.0, extra={"a": a, "b": [b, "text"]}).sum().backward()
    grad_x, grad_y, grad_scale, grad_extra = seen[0][1]
    assert same(grad_x, x.grad)
    assert grad_y is None
    assert grad_scale is None
    assert same(grad_extra[0], a.grad)
    assert same(grad_extra[1][0], b.grad)
    assert grad_extra[1][1] is None


def test_several_outputs_have_an_entry_each() -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2, {"b": x * 3}, "text"

    model = Wrapped(Split())
    seen = attach(model)
    x = torch.ones(1, requires_grad=True)
    first, rest, _ = model(x)
    (first + 10 * rest["b"]).backward()
    _, grad_input, grad_output = seen[0]
    assert grad_input[0].item() == 32
    assert grad_output[0].item() == 1
    assert grad_output[1][0].item() == 10
    assert grad_output[2] is None


def test_unused_output_and_input_are_none() -> None:
    class Partial(nn.Module):
        def forward(self, x: Tensor, unused: Tensor) -> Any:
            return x * 2, x * 3

    model = Wrapped(Partial())
    seen = attach(model)
    x, unused = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    model(x, unused)[0].backward()
    assert seen[0][1][1] is None
    assert seen[0][2][1] is None
    assert seen[0][1][0].item() == 2
    assert len(seen) == 1


def test_module_whose_inputs_need_no_gradient_is_called_at_the_end() -> None:
    net = Net()
    seen = attach(net, "fc*")
    net(torch.ones(1, 3)).sum().backward()
    assert [given[0] for given in seen] == [net.fc2, net.fc1]
    assert seen[1][1] == (None,)
    assert seen[1][2][0].shape == (1, 4)


def test_visits_are_called_in_the_order_of_backward() -> None:
    model = Twice()
    seen = attach(model, "fc")
    x = torch.randn(1, 3, requires_grad=True)
    model(x).sum().backward()
    assert len(seen) == 2
    assert same(seen[1][1][0], x.grad)


def test_each_backward_pass_calls_once() -> None:
    model = Wrapped(Mixer())
    seen = attach(model)
    x = torch.randn(2, requires_grad=True)
    loss = model(x, x).sum()
    for _ in range(3):
        torch.autograd.grad(loss, x, retain_graph=True)
    assert len(seen) == 3


def test_return_replaces_the_input_gradients() -> None:
    model = Wrapped(Mixer())
    hl.register_backward_hook(model, "inner", lambda m, gi, go: (gi[0] * 2, None))
    x, y = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    model(x, y).sum().backward()
    plain = torch.autograd.grad(Mixer()(x, y).sum(), x)[0]
    assert same(x.grad, 2 * plain)
    assert y.grad is None


def test_single_tensor_return_replaces_the_only_input_gradient() -> None:
    net, x = Net(), torch.randn(1, 3, requires_grad=True)
    with hl.register_backward_hook(net, "", lambda m, gi, go: torch.full_like(gi[0], 7)):
        net(x).sum().backward()
    assert x.grad.tolist() == [[7, 7, 7]]


def test_pre_hook_return_replaces_the_output_gradient() -> None:
    net, x, seen = Net(), torch.randn(1, 3, requires_grad=True), []
    hl.register_backward_pre_hook(net, "fc2", lambda m, go: seen.append(go) or go[0] * 0)
    net(x).sum().backward()
    assert seen[0][0].tolist() == [[1, 1]]
    assert not x.grad.any()
    assert not net.fc2.weight.grad.any()


def test_prepend_runs_before_hooks_attached_earlier() -> None:
    net, seen = Net(), []
    for name, prepend in (("a", False), ("b", False), ("first", True)):
        hl.register_backward_pre_hook(
            net, "fc2", lambda *_, name=name: seen.append(name), prepend=prepend
        )
        hl.register_backward_hook(
            net, "fc2", lambda *_, name=name: seen.append(name), prepend=prepend
        )
    net(torch.ones(1, 3)).sum().backward()
    assert seen == ["first", "a", "b"] * 2


@pytest.mark.parametrize("is_pre", [False, True])
def test_wrong_number_of_gradients_is_refused(is_pre: bool) -> None:
    net = Net()
    register = hl.register_backward_pre_hook if is_pre else hl.register_backward_hook
    register(net, "fc2", lambda module, first, *_: (*first, *first))
    with pytest.raises(hl.EditError) as caught:
        net(torch.ones(1, 3)).sum().backward()
    port = "output" if is_pre else "input"
    assert str(caught.value) == (
        f"the backward hook at `fc2:{port}.grad`, call 0, visit 0 returned 2 gradients for 1. "
        "Return a tuple with one entry for each, or None to keep them."
    )


def test_gradient_where_there_is_none_is_refused() -> None:
    model = Wrapped(Mixer())
    hl.register_backward_hook(model, "inner", lambda m, gi, go: (gi[0], gi[0]))
    with pytest.raises(hl.EditError) as caught:
        model(torch.ones(1, requires_grad=True), torch.ones(1)).sum().backward()
    assert str(caught.value) == (
        "the backward hook at `inner:input.grad`, call 0, visit 0 returned a gradient where there "
        "is none. Return None in that place."
    )


def test_gradient_of_another_shape_is_refused() -> None:
    net = Net()
    hl.register_backward_hook(net, "fc2", lambda m, gi, go: gi[0][0])
    with pytest.raises(hl.EditError, match=r"returned shape \(4,\) for \(1, 4\)"):
        net(torch.ones(1, 3)).sum().backward()


def test_return_for_inputs_without_gradient_is_refused() -> None:
    net = Net()
    hl.register_backward_hook(net, "fc1", lambda m, gi, go: (torch.ones(1, 3),))
    with pytest.raises(hl.EditError) as caught:
        net(torch.ones(1, 3)).sum().backward()
    assert str(caught.value) == (
        "the backward hook at `fc1` returned gradients, but none of the module's inputs requires "
        "one. Return None."
    )


def test_hooks_change_no_gradient_of_the_model() -> None:
    net, x = Net(), torch.randn(4, 3, requires_grad=True)
    net(x).pow(2).sum().backward()
    plain = [x.grad.clone(), *(p.grad.clone() for p in net.parameters())]
    net.zero_grad()
    x.grad = None
    attach(net, "**")
    net(x).pow(2).sum().backward()
    found = [x.grad, *(p.grad for p in net.parameters())]
    assert all(same(mine, right) for mine, right in zip(found, plain, strict=True))
