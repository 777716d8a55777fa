"""Gradients at the Conv2d and the Linear of a small net.

A legacy hook hands over the inputs of the last autograd node, so it shows the weight of the
convolution among its inputs and an input of the Linear that nobody passed. Here an entry belongs
to an argument of the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

Shapes = tuple[list[tuple[int, ...] | None], list[tuple[int, ...] | None]]


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 2, stride=2)
        self.relu = nn.ReLU()
        self.fc1 = nn.Linear(160, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(self.relu(self.conv(x)).view(-1))


@pytest.fixture
def net() -> SmallNet:
    return SmallNet()


@pytest.fixture
def image() -> Tensor:
    return torch.randn(1, 3, 8, 8)


class Shown:
    """A hook that notes the shapes it is given, by the class of the module, in order."""

    def __init__(self) -> None:
        self.shapes: dict[str, Shapes] = {}

    def __call__(self, module: nn.Module, grad_in: Any, grad_out: Any) -> None:
        sides = [
            [None if g is None else tuple(g.shape) for g in side] for side in (grad_in, grad_out)
        ]
        self.shapes[type(module).__name__] = (sides[0], sides[1])


@pytest.fixture
def shown(net: SmallNet) -> Iterator[Shown]:
    shown = Shown()
    with hl.register_backward_hook(net, ["conv", "fc1"], shown):
        yield shown


def test_shapes_belong_to_the_arguments(net: SmallNet, image: Tensor, shown: Shown) -> None:
    """The image is data and has no gradient, which the hook is told with None."""
    (1 - net(image).mean()).backward()
    assert list(shown.shapes.items()) == [
        ("Linear", ([(160,)], [(5,)])),
        ("Conv2d", ([None], [(1, 10, 4, 4)])),
    ]


def test_image_that_requires_grad_has_one(net: SmallNet, image: Tensor, shown: Shown) -> None:
    (1 - net(image.requires_grad_()).mean()).backward()
    assert shown.shapes["Conv2d"] == ([(1, 3, 8, 8)], [(1, 10, 4, 4)])


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
def test_legacy_hooks_of_torch_answer_otherwise(net: SmallNet, image: Tensor) -> None:
    legacy = Shown()
    net.conv.register_backward_hook(legacy)
    net.fc1.register_backward_hook(legacy)
    (1 - net(image).mean()).backward()
    assert legacy.shapes == {
        "Linear": ([(1, 5)], [(5,)]),
        "Conv2d": ([None, (10, 3, 2, 2), (10,)], [(1, 10, 4, 4)]),
    }


def test_values_are_those_of_autograd(net: SmallNet, image: Tensor) -> None:
    image.requires_grad_()
    with hl.capture(net, "conv", "fc1", "conv:input", "fc1:input", grads=True) as got:
        (1 - net(image).mean()).backward()

    conv = net.conv(image)
    flat = net.relu(conv).view(-1)
    out = net.fc1(flat)
    of_image, of_conv, of_flat, of_out = torch.autograd.grad(
        1 - out.mean(), [image, conv, flat, out]
    )
    assert torch.equal(got["conv:input.input.grad"], of_image)
    assert torch.equal(got["conv:output.grad"], of_conv)
    assert torch.equal(got["fc1:input.input.grad"], of_flat)
    assert torch.equal(got["fc1:output.grad"], of_out)
    assert torch.equal(of_out, torch.full((5,), -0.2))


def test_weights_have_their_gradients_under_their_own_names(net: SmallNet, image: Tensor) -> None:
    with hl.capture(net, "conv.*:grad", "fc1.*:grad") as got:
        (1 - net(image).mean()).backward()
    shapes = {name: tuple(grad.shape) for name, grad in got.tensors().items()}
    assert shapes == {
        "conv.weight:grad": (10, 3, 2, 2),
        "conv.bias:grad": (10,),
        "fc1.weight:grad": (5, 160),
        "fc1.bias:grad": (5,),
    }
    assert torch.equal(got["conv.weight:grad"], net.conv.weight.grad)
