"""A forward hook on a Conv, BatchNorm, ReLU net as a whole, then on `layers[1]` alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, 3, 28, 28)


def test_hook_list_holds_the_input_of_the_whole_then_of_the_part(net: Net, x: Tensor) -> None:
    hook_list: list[tuple[Tensor, ...]] = []

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        hook_list.append(args)

    handle = hl.register_forward_hook(net, "", hook)
    net(x)
    handle.remove()
    [(seen,)] = hook_list
    assert seen is x

    handle = hl.register_forward_hook(net, "layers.1", hook)
    net(x)
    handle.remove()
    assert len(hook_list) == 2
    [seen] = hook_list[1]
    assert torch.equal(seen, net.layers[0](x))
    assert seen.shape == (1, 3, 26, 26)

    net(x)
    assert len(hook_list) == 2


def test_module_itself_may_stand_for_its_path(net: Net, x: Tensor) -> None:
    seen: list[str] = []
    with hl.register_forward_hook(net, net.layers[1], lambda m, *_: seen.append(type(m).__name__)):
        net(x)
    assert seen == ["BatchNorm2d"]


def test_capture_holds_the_inputs_of_both_in_one_run(net: Net, x: Tensor) -> None:
    with hl.capture(net, ":input.x", "layers.1:input.input") as got:
        net(x)
    assert torch.equal(got[":input.x"], x)
    assert torch.equal(got["layers.1:input.input"], net.layers[0](x))


def test_hook_leaves_the_running_statistics_as_torch_makes_them(net: Net, x: Tensor) -> None:
    """A look at a batch norm in training mode is no second batch."""
    twin = copy.deepcopy(net)
    expected = twin(x)
    with hl.capture(net) as got:
        assert torch.equal(net(x), expected)
    assert torch.equal(got["layers.2"].output, expected)
    assert net.layers[1].num_batches_tracked == 1
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name))


def test_returned_value_replaces_the_output(net: Net, x: Tensor) -> None:
    """Which the note warns of: what a forward hook returns is what flows on."""
    with hl.register_forward_hook(net, "layers.1", lambda m, args, output: -output.abs()):
        assert net(x).count_nonzero() == 0
    with hl.hook(net, "layers.1", lambda value, at: -value.abs()):  # an observer's is ignored
        assert net(x).count_nonzero() > 0
