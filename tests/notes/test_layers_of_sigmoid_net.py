"""A Hook object for every layer of a net of two sigmoids, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

LAYERS = ["fc1", "s1", "fc2", "s2"]


class SigmoidNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.s1 = nn.Linear(2, 2), nn.Sigmoid()
        self.fc2, self.s2 = nn.Linear(2, 2), nn.Sigmoid()
        self.fc1.weight = nn.Parameter(torch.tensor([[0.15, 0.2], [0.25, 0.3]]))
        self.fc1.bias = nn.Parameter(torch.tensor([0.35]))
        self.fc2.weight = nn.Parameter(torch.tensor([[0.4, 0.45], [0.5, 0.55]]))
        self.fc2.bias = nn.Parameter(torch.tensor([0.6]))

    def forward(self, x: Tensor) -> Tensor:
        return self.s2(self.fc2(self.s1(self.fc1(x))))


class Hook:
    """Keep what one layer last received and gave, or their gradients."""

    def __init__(self, net: nn.Module, path: str, *, backward: bool = False) -> None:
        register = hl.register_backward_hook if backward else hl.register_forward_hook
        self.input: tuple[Any, ...] | None = None
        self.output: Any = None
        self._handle = register(net, path, self._keep)

    def _keep(self, module: nn.Module, received: tuple[Any, ...], given: Any) -> None:
        self.input, self.output = received, given

    def close(self) -> None:
        self._handle.remove()


@pytest.fixture
def net() -> SigmoidNet:
    return SigmoidNet()


@pytest.fixture
def data() -> Tensor:
    return torch.tensor([0.05, 0.1])


def run_by_hand(net: SigmoidNet, data: Tensor) -> list[Tensor]:
    """Give what each layer gives, by the formulas alone."""
    values = [net.fc1.weight @ data + net.fc1.bias]
    values.append(1 / (1 + torch.exp(-values[-1])))
    values.append(net.fc2.weight @ values[-1] + net.fc2.bias)
    values.append(1 / (1 + torch.exp(-values[-1])))
    return values


def test_forward_hooks_hold_each_layers_input_and_output(net: SigmoidNet, data: Tensor) -> None:
    hooks = [Hook(net, path) for path in LAYERS]
    out = net(data)
    expected = [data, *run_by_hand(net, data)]
    for hook, received, given in zip(hooks, expected[:-1], expected[1:], strict=True):
        assert hook.input is not None
        torch.testing.assert_close(hook.input, (received,))
        torch.testing.assert_close(hook.output, given)
    assert hooks[-1].output is out


def test_backward_hooks_hold_each_layers_gradients(net: SigmoidNet, data: Tensor) -> None:
    hooks = [Hook(net, path, backward=True) for path in LAYERS]
    data.requires_grad_()
    net(data).backward(torch.ones(2), retain_graph=True)
    values = run_by_hand(net, data)
    expected = torch.autograd.grad(values[-1].sum(), [data, *values])
    for hook, received, given in zip(hooks, expected[:-1], expected[1:], strict=True):
        torch.testing.assert_close(hook.input, (received,))
        torch.testing.assert_close(hook.output, (given,))
    assert torch.equal(hooks[-1].output[0], torch.ones(2))


def test_first_layer_of_plain_data_has_no_input_gradient(net: SigmoidNet, data: Tensor) -> None:
    hook = Hook(net, "fc1", backward=True)
    net(data).backward(torch.ones(2))
    assert hook.input == (None,)
    assert hook.output[0].shape == (2,)


def test_one_call_hooks_every_layer(net: SigmoidNet, data: Tensor) -> None:
    """The net's own layers, without naming them one by one."""
    with hl.capture(net, "*", inputs=True, grads=True) as got:
        net(data).backward(torch.ones(2))
    assert [visit.path for visit in got] == LAYERS
    values = run_by_hand(net, data)
    for path, value, grad in zip(
        LAYERS, values, torch.autograd.grad(values[-1].sum(), values), strict=True
    ):
        torch.testing.assert_close(got[path].output, value)
        torch.testing.assert_close(got[path].output.grad, grad)
    assert torch.equal(got["fc1"].input, data)


def test_closed_hooks_hold_what_they_had_and_leave_nothing(net: SigmoidNet, data: Tensor) -> None:
    hooks = [Hook(net, path, backward=way) for path in LAYERS for way in (False, True)]
    net(data).backward(torch.ones(2))
    held = [hook.output for hook in hooks]
    for hook in hooks:
        hook.close()
        hook.close()
    net(2 * data).backward(torch.ones(2))
    assert all(hook.output is was for hook, was in zip(hooks, held, strict=True))
    assert len(hl.inventory(net)) == 0
