"""When backward hooks run: in one order always, and with the output and input side in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_order_does_not_depend_on_the_input_requiring_grad(needs_grad: bool) -> None:
    """Torch calls the whole net first when its input is data, last when it requires grad."""
    net, order = _net(), []
    names = {module: name for name, module in net.named_modules()}
    hl.register_backward_hook(net, "**", lambda m, gi, go: order.append(names[m]))
    net(torch.randn(2, 3, requires_grad=needs_grad)).sum().backward()
    assert order == ["2", "1", "0", ""]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_order_is_the_same_for_hooks_attached_one_by_one(needs_grad: bool) -> None:
    """Each handle has its own end of backward; modules deeper in the graph still come first."""
    net, order = _net(), []
    for name in ("", "0", "1", "2"):
        hl.register_backward_hook(net, name, lambda m, gi, go, name=name: order.append(name))
    net(torch.randn(2, 3, requires_grad=needs_grad)).sum().backward()
    assert order == ["2", "1", "0", ""]


def test_data_input_gives_none_for_the_input_and_the_gradient_of_the_output() -> None:
    net, seen = _net(), []
    hl.register_backward_hook(net, "0", lambda m, gi, go: seen.append((gi, go)))
    x = torch.randn(2, 3)
    with hl.capture(net, "0", grads=True) as got:
        net(x).sum().backward()
    [(grad_input, grad_output)] = seen
    assert grad_input == (None,)
    assert torch.equal(grad_output[0], got["0:output.grad"])


@pytest.mark.parametrize("needs_grad", [False, True])
def test_parameter_gradients_are_events_of_their_own(needs_grad: bool) -> None:
    """Whether `weight.grad` is there in torch's backward hook depends on the input."""
    linear, seen = nn.Linear(2, 2), []
    hl.hook(linear, "weight:grad", lambda grad, at: seen.append(grad))
    hl.register_backward_hook(linear, "", lambda m, gi, go: seen.append(m.weight.grad is not None))
    linear(torch.ones(1, 2, requires_grad=needs_grad)).sum().backward()
    assert torch.equal(seen[0], linear.weight.grad)
    assert seen[1] is True


def test_pre_hook_runs_before_the_hook_and_the_hook_sees_what_it_returned() -> None:
    net, order = _net(), []
    hl.register_backward_hook(net, "1", lambda m, gi, go: order.append(("hook", go[0])))
    hl.register_backward_pre_hook(net, "1", lambda m, go: order.append(("pre", go[0])) or go)
    hl.register_backward_pre_hook(net, "1", lambda m, go: go[0] * 10)
    net(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert [name for name, _ in order] == ["pre", "hook"]


def test_gradient_of_a_weight_alone_still_pairs_both_sides() -> None:
    """Torch calls the pre hook and never the hook when only the weight's gradient is asked for."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * 2

    model = Doubling()
    events: list[Any] = []
    hl.register_backward_pre_hook(model, "", lambda m, go: events.append("pre"))
    hl.register_backward_hook(model, "", lambda m, gi, go: events.append((gi, go)))
    loss = model(torch.ones(1, 2, requires_grad=True)).sum()
    torch.autograd.grad(loss, model.linear.weight)
    assert events[0] == "pre"
    assert len(events) == 2
    grad_input, grad_output = events[1]
    assert grad_input == (None,)
    assert torch.equal(grad_output[0], torch.ones(1, 2))


def test_loss_through_an_attribute_fires_with_no_output_gradient() -> None:
    """Torch fires nothing when the loss does not pass through the return value."""

    class Aside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.aside = x**2
            return x * 2

    module, seen = Aside(), []
    hl.register_backward_hook(module, "", lambda m, gi, go: seen.append((gi, go)))
    x = torch.ones(2, requires_grad=True)
    module(x)
    module.aside.sum().backward()
    [(grad_input, grad_output)] = seen
    assert torch.equal(grad_input[0], x.grad)
    assert grad_output == (None,)


def test_observers_of_a_gradient_before_and_after_edits() -> None:
    """Torch's `retain_grad` holds the value after all hooks, whenever it was called."""
    net = _net()
    order: list[tuple[str, Tensor]] = []
    where = "1:output.grad"
    hl.hook(net, where, lambda g, at: order.append(("after", g)))
    hl.hook(net, where, lambda g, at: order.append(("edit 1", g)) or g * 10, edit=True)
    hl.hook(net, where, lambda g, at: order.append(("edit 2", g)) or g + 1, edit=True)
    hl.hook(net, where, lambda g, at: order.append(("before", g)), before_edits=True)
    hl.hook(
        net, where, lambda g, at: order.append(("first", g)) or hl.KEEP, edit=True, prepend=True
    )
    net(torch.randn(2, 3)).sum().backward()
    assert [name for name, _ in order] == ["before", "first", "edit 1", "edit 2", "after"]
    seen = dict(order)
    assert torch.equal(seen["before"], seen["first"])
    assert torch.equal(seen["edit 2"], seen["before"] * 10)
    assert torch.equal(seen["after"], seen["before"] * 10 + 1)


def test_captures_of_a_gradient_before_and_after_edits() -> None:
    net = _net()
    with (
        hl.capture(net, "1", grads=True) as after,
        hl.edit(net, {"1:output.grad": hl.scale(3)}),
        hl.capture(net, "1", grads=True, before_edits=True) as before,
    ):
        net(torch.randn(2, 3)).sum().backward()
    assert torch.equal(after["1:output.grad"], before["1:output.grad"] * 3)


def test_hooks_of_several_backwards_at_once_do_not_mix() -> None:
    """Two graphs of one model, walked together by one backward pass."""
    net, seen = _net(), []
    hl.register_backward_hook(net, "2", lambda m, gi, go: seen.append(go[0].flatten().tolist()))
    a, b = net(torch.ones(1, 3)), net(torch.ones(1, 3))
    (a.sum() * 2 + b.sum() * 3).backward()
    assert sorted(seen) == [[2.0], [3.0]]


def test_backward_inside_a_hook_of_another_backward() -> None:
    """A hook may run a backward of its own: gradients go to the right visits."""
    outer, inner = _net(), _net()
    seen: list[float] = []
    hl.register_backward_hook(inner, "2", lambda m, gi, go: seen.append(go[0].item()))

    def backward_of_another(grad: Tensor, at: hl.At) -> None:
        with torch.enable_grad():
            (inner(torch.ones(1, 3)).sum() * 7).backward()

    hl.hook(outer, "1:output.grad", backward_of_another)
    hl.register_backward_hook(outer, "2", lambda m, gi, go: seen.append(go[0].item()))
    (outer(torch.ones(1, 3)).sum() * 5).backward()
    assert sorted(seen) == [5.0, 7.0]
