"""A module with a 3x1 parameter reads `y`: a tensor hook, a forward and a backward hook see it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[1.0], [2.0], [3.0]]))

    def forward(self, y: Tensor) -> Tensor:
        return y @ self.w


class Readings:
    """What the three hooks saw of one run."""

    def __init__(self) -> None:
        self.model = Weighted()
        self.x = torch.tensor([[4.0, 5.0, 6.0]], requires_grad=True)
        self.tensor: list[Tensor] = []
        self.forward: list[tuple[Tensor, ...]] = []
        self.backward: list[tuple[Tensor, ...]] = []

    def keep_forward(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self.forward.append((*inputs, output))

    def keep_backward(
        self, module: nn.Module, grad_in: tuple[Tensor], grad_out: tuple[Tensor]
    ) -> None:
        self.backward.append((*grad_in, *grad_out))

    def run(self, *, used_again: bool = False) -> Tensor:
        y = self.x * 2
        with (
            hl.register_hook(y, self.tensor.append),
            hl.register_forward_hook(self.model, "", self.keep_forward),
            hl.register_backward_hook(self.model, "", self.keep_backward),
        ):
            loss = self.model(y).sum()
            (loss + y.sum() if used_again else loss).backward()
        return y


@pytest.fixture
def readings() -> Readings:
    return Readings()


def test_forward_hook_reads_y_and_the_output(readings: Readings) -> None:
    y = readings.run()
    [(seen, output)] = readings.forward
    assert torch.equal(seen, y)
    assert torch.equal(seen, torch.tensor([[8.0, 10.0, 12.0]]))
    assert torch.equal(output, torch.tensor([[64.0]]))


def test_tensor_hook_and_backward_hook_read_the_same_gradient(readings: Readings) -> None:
    readings.run()
    [of_tensor] = readings.tensor
    [(grad_in, grad_out)] = readings.backward
    assert torch.equal(of_tensor, readings.model.w.detach().T)
    assert torch.equal(grad_in, of_tensor)
    assert torch.equal(grad_out, torch.ones(1, 1))


def test_y_itself_has_no_grad_but_leaves_do(readings: Readings) -> None:
    y = readings.run()
    with pytest.warns(UserWarning, match="not a leaf"):
        assert y.grad is None
    assert torch.equal(readings.x.grad, 2 * readings.model.w.detach().T)
    assert torch.equal(readings.model.w.grad, y.detach().T)


def test_backward_hook_reads_the_modules_part_alone(readings: Readings) -> None:
    """Used a second time outside of the module, `y` has a gradient of which it made one part."""
    readings.run(used_again=True)
    [of_tensor] = readings.tensor
    [(grad_in, _)] = readings.backward
    assert torch.equal(grad_in, torch.tensor([[1.0, 2.0, 3.0]]))
    assert torch.equal(of_tensor, torch.tensor([[2.0, 3.0, 4.0]]))


def test_hooks_are_gone_afterwards(readings: Readings) -> None:
    readings.run()
    assert len(hl.inventory(readings.model)) == 0
    readings.model(readings.x).sum().backward()
    assert [len(readings.tensor), len(readings.forward), len(readings.backward)] == [1, 1, 1]


def test_capture_reads_all_of_it_at_once(readings: Readings) -> None:
    model, x = readings.model, readings.x
    with hl.capture(model, "", ":input.y", "w:grad", grads=True) as got:
        model(x * 2).sum().backward()
    assert torch.equal(got[":input.y"], torch.tensor([[8.0, 10.0, 12.0]]))
    assert torch.equal(got[":input.y.grad"], torch.tensor([[1.0, 2.0, 3.0]]))
    assert torch.equal(got[":output"], torch.tensor([[64.0]]))
    assert torch.equal(got[":output.grad"], torch.ones(1, 1))
    assert torch.equal(got["w:grad"], torch.tensor([[8.0], [10.0], [12.0]]))
