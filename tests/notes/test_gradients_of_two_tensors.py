"""`b = 2 * a`, `c = b.mean()` over five ones: a gets 0.4, and b, which torch forgets, 0.2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class MeanOfTwice(nn.Module):
    """The same arithmetic as a module, where `b` has an address."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()

    def forward(self, a: Tensor) -> Tensor:
        return self.twice(a).mean()


class Twice(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return 2 * a


@pytest.fixture
def a() -> Tensor:
    return torch.ones(5, requires_grad=True)


def test_torch_forgets_the_gradient_of_b(a: Tensor) -> None:
    b = 2 * a
    b.mean().backward()
    assert torch.equal(a.grad, torch.full((5,), 0.4))
    with pytest.warns(UserWarning, match="not a leaf"):
        assert b.grad is None


def test_tensor_hooks_print_b_then_a(a: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    b = 2 * a
    hl.register_hook(a, lambda grad: print(f"a.grad = {grad}"))
    hl.register_hook(b, lambda grad: print(f"b.grad = {grad}"))
    b.mean().backward()
    assert capsys.readouterr().out.splitlines() == [
        "b.grad = tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000])",
        "a.grad = tensor([0.4000, 0.4000, 0.4000, 0.4000, 0.4000])",
    ]


def test_tensor_hook_that_returns_changes_what_flows_on(a: Tensor) -> None:
    b = 2 * a
    hl.register_hook(b, lambda grad: 10 * grad)
    b.mean().backward()
    torch.testing.assert_close(a.grad, torch.full((5,), 4.0))


def test_tensor_hook_removed_before_backward_is_silent(a: Tensor) -> None:
    b = 2 * a
    seen: list[Tensor] = []
    with hl.register_hook(b, seen.append):
        c = b.mean()
    c.backward()
    assert seen == []
    assert torch.equal(a.grad, torch.full((5,), 0.4))


def test_capture_keeps_both_without_retain_grad(a: Tensor) -> None:
    model = MeanOfTwice()
    with hl.capture(model, "twice", "twice:input.a", grads=True) as got:
        model(a).backward()
    assert torch.equal(got["twice:input.a.grad"], torch.full((5,), 0.4))
    assert torch.equal(got["twice:output.grad"], torch.full((5,), 0.2))
    assert torch.equal(got["twice"].output.grad, torch.full((5,), 0.2))
    assert torch.equal(got["twice"].output, torch.full((5,), 2.0))
    assert torch.equal(a.grad, torch.full((5,), 0.4))
