"""Where there is no gradient: said with the reason, never silently nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Stop(torch.autograd.Function):
    """Give no gradient to what came before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Stopping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Stop.apply(x)


def _frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[:2].requires_grad_(False)
    return model


def test_frozen_part_is_named_with_the_reason() -> None:
    """Torch's hooks on a frozen backbone fire for nothing and say nothing."""
    model = _frozen()
    with (
        pytest.warns(hl.HooklineWarning, match=r"1:output\.grad: no gradient: nothing it was"),
        hl.capture(model, "1", "2", grads=True) as got,
    ):
        model(torch.tensor([1, 2])).sum().backward()
    assert [one.address for one in got.report().problems] == ["1:output.grad"]
    with pytest.raises(hl.NotCaptured, match="requires grad"):
        got["1:output.grad"]
    assert torch.equal(got["2:output.grad"], torch.ones(2, 1))


def test_frozen_part_named_by_a_pattern_is_in_the_report_without_a_warning() -> None:
    model = _frozen()
    with hl.capture(model, "*", grads=True) as got:
        model(torch.tensor([1, 2])).sum().backward()
    assert [one.address for one in got.report().problems] == ["0:output.grad", "1:output.grad"]


def test_frozen_module_between_trained_ones_has_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[1].requires_grad_(False)
    with hl.capture(model, "*", grads=True) as got:
        model(torch.ones(1, 3)).sum().backward()
    torch.testing.assert_close(got["1:output.grad"], model[2].weight.detach())


def test_no_gradient_from_the_next_operation_is_missing() -> None:
    """A torch tensor hook is called with None there, which `grad.norm()` does not survive."""
    model = nn.Sequential(nn.Linear(2, 2), Stopping())
    seen: list[Any] = []
    edited: list[Any] = []
    hl.hook(model, "0:output.grad", lambda grad, at: seen.append(grad))
    hl.hook(model, "0:output.grad", lambda grad, at: edited.append(grad) or grad, edit=True)
    model(torch.ones(1, 2)).sum().backward()
    assert edited == []
    assert seen == [hl.MISSING]
    assert model[0].weight.grad is None


def test_tensor_hook_is_not_called_with_none() -> None:
    h = torch.ones(2, requires_grad=True) * 2
    seen: list[Any] = []
    hl.register_hook(h, seen.append)
    Stop.apply(h).sum().backward()
    assert seen == []


def test_stopped_gradient_is_reported_as_not_reached() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Stopping())
    with (
        pytest.warns(hl.HooklineWarning, match=r"0:output\.grad: no gradient"),
        hl.capture(model, "0", grads=True) as got,
    ):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(hl.NotCaptured, match="has no gradient"):
        got["0:output.grad"]


def test_detached_part_is_reported_as_not_reached() -> None:
    class Detaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).detach())

    model = Detaching()
    with (
        pytest.warns(hl.HooklineWarning, match=r"a:output\.grad.*did not reach it"),
        hl.capture(model, "a", "b", grads=True) as got,
    ):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(hl.NotCaptured, match=r"`a:output\.grad` has no gradient"):
        got["a:output.grad"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradient_hooks_do_not_disturb_a_run_without_grad(mode: Any) -> None:
    """`output.register_hook` in a torch hook raises there."""
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), []
    hl.hook(model, "*:output.grad", lambda grad, at: seen.append(grad))
    hl.hook(model, "*:input.grad", lambda grad, at: seen.append(grad))
    hl.register_backward_hook(model, "*", lambda *a: seen.append(a))
    with mode():
        expected = model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert expected.shape == (1, 1)
    assert seen == []


def test_run_without_grad_is_the_reason_reported() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with (
        pytest.warns(hl.HooklineWarning, match=r"0:output\.grad.*torch\.no_grad"),
        hl.capture(model, "0", grads=True) as got,
        torch.no_grad(),
    ):
        model(torch.ones(1, 2))
    assert got["0"].output.shape == (1, 2)
    with pytest.raises(hl.NotCaptured, match=r"torch\.no_grad"):
        got["0:output.grad"]


def test_module_under_no_grad_inside_a_forward_with_grad() -> None:
    """A frozen teacher inside the model: values are captured, gradients have their reason."""

    class Distilling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            return (self.student(x) - target).square().sum()

    model = Distilling()
    seen: list[str] = []
    hl.register_backward_hook(model, "*", lambda m, gi, go: seen.append("student"))
    with (
        pytest.warns(hl.HooklineWarning, match=r"teacher:output\.grad.*torch\.no_grad"),
        hl.capture(model, "teacher", "student", grads=True) as got,
    ):
        model(torch.ones(1, 2)).backward()
    expected = 2 * (got["student"].output - got["teacher"].output)
    torch.testing.assert_close(got["student:output.grad"], expected)
    assert seen == ["student"]


def test_backward_after_the_block_is_the_reason_reported() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with (
        pytest.warns(hl.HooklineWarning, match="no backward reached a captured site"),
        hl.capture(model, "0", grads=True) as got,
    ):
        loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    with pytest.raises(hl.NotCaptured):
        got["0:output.grad"]


def test_one_call_with_grad_and_one_without() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.capture(model, "0", grads=True) as got:
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 2))
    assert torch.equal(got.calls[0]["0:output.grad"], torch.ones(1, 2))
    with pytest.raises(hl.NotCaptured, match=r"torch\.no_grad"):
        got.calls[1]["0:output.grad"]
