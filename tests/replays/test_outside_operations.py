"""Operations of a script outside of its models: what made the loss non-finite."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from failing_models import Applied, line_of
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from hookline.replays import OutsideOperations, find_origin, keep_call

HERE = "tests/replays/test_outside_operations.py"


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[OutsideOperations]:
    """Give one that is off the stack again at the end."""
    # Other tests of this process may have compiled something, after which it does not start.
    if "torch._dynamo.convert_frame" in sys.modules:
        monkeypatch.setattr("torch._dynamo.convert_frame.FRAME_COUNTER", 0)
    made = OutsideOperations()
    yield made
    made.stop()
    assert not _get_current_function_mode_stack()


def test_operation_of_the_loss_is_named_with_its_line(outside: OutsideOperations) -> None:
    output = torch.rand(4, 3, requires_grad=True) * 0
    outside.start()
    kept = output * 2
    loss = -torch.log(kept).mean()  # first
    outside.stop()
    assert torch.isinf(loss)
    origin = outside.find()
    assert origin is not None
    line = line_of("# " + "first", __file__)
    assert origin.site == f"{HERE}:{line}/log"
    assert origin.source == f"{HERE}:{line}"
    assert origin.line.startswith("loss = -torch.log(kept).mean()")
    assert (origin.operation, origin.kind, origin.cause) == ("log", "inf", "operation")
    assert origin.why == "log of 0"
    assert origin.inputs[0]["max"] == 0


def test_tensors_that_are_there_tell_more(outside: OutsideOperations) -> None:
    pred, std = torch.randn(4, requires_grad=True), torch.tensor([1.0, 0.0, 2.0, 0.0])
    outside.start()
    scaled = pred / std
    loss = scaled.sum()
    outside.stop()
    assert not torch.isfinite(loss)
    origin = outside.find()
    assert origin is not None
    assert origin.why == "division by zero (2 elements of `std` are 0)"


def test_value_that_came_in_is_not_the_scripts(outside: OutsideOperations) -> None:
    output = torch.full((3,), float("nan"), requires_grad=True)
    outside.start()
    loss = output.exp().mean()
    outside.stop()
    assert loss.isnan()
    assert outside.find() is None


def test_finite_loss_is_no_origin(outside: OutsideOperations) -> None:
    outside.start()
    loss = F.mse_loss(torch.rand(3, requires_grad=True), torch.rand(3))
    outside.stop()
    assert torch.isfinite(loss)
    assert outside.find() is None


def test_mask_is_no_origin_and_row_of_it_is(outside: OutsideOperations) -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    outside.start()
    masked = logits.masked_fill(torch.tensor([[True] * 3, [False] * 3]), float("-inf"))
    loss = masked.softmax(-1).mean()
    outside.stop()
    assert loss.isnan()
    origin = outside.find()
    assert origin is not None
    assert origin.operation == "softmax"


def test_value_that_is_thrown_away_is_no_origin(outside: OutsideOperations) -> None:
    x = torch.rand(3, requires_grad=True)
    outside.start()
    loss = torch.where(x > -1, x, torch.log(x * 0 - 1)).mean()
    outside.stop()
    assert torch.isfinite(loss)
    assert outside.find() is None


def test_infinite_slope_is_told_where_all_values_are_finite(outside: OutsideOperations) -> None:
    pred = torch.rand(3, requires_grad=True)
    outside.start()
    loss = ((pred * 0) ** 2).sum().sqrt()  # slope
    outside.stop()
    loss.backward()
    assert pred.grad is not None
    assert pred.grad.isnan().all()
    origin = outside.find()
    assert origin is not None
    assert origin.is_backward
    assert origin.site == f"{HERE}:{line_of('# ' + 'slope', __file__)}/sqrt"
    assert origin.why == "sqrt at 0 has an infinite slope"


def test_reset_forgets(outside: OutsideOperations) -> None:
    outside.start()
    torch.log(torch.zeros(())) * 0
    outside.stop()
    assert outside.find() is not None
    assert outside.find() is not None
    outside.reset()
    assert outside.find() is None


def test_more_can_be_noted_after_a_find(outside: OutsideOperations) -> None:
    outside.start()
    fine = torch.ones(()) + 1
    outside.stop()
    assert outside.find() is None
    outside.start()
    torch.sqrt(fine - 9)
    outside.stop()
    origin = outside.find()
    assert origin is not None
    assert origin.operation == "sqrt"


def test_values_and_gradients_are_the_same(outside: OutsideOperations) -> None:
    def train(is_noted: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        if is_noted:
            outside.start()
        loss = F.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 4)
        loss = loss + model.weight.norm() * 0.1
        loss.backward()
        if is_noted:
            outside.stop()
        assert model.weight.grad is not None
        return [loss.detach(), model.weight.grad]

    for one, other in zip(train(True), train(False), strict=True):
        assert torch.equal(one, other)


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_it_does_not_start_under_another_mode(outside: OutsideOperations) -> None:
    mode = _Mode()
    with mode:
        outside.start()
        assert _get_current_function_mode_stack() == [mode]
        torch.log(torch.zeros(())) * 0
        outside.stop()
    assert outside.find() is None


def test_it_leaves_when_a_mode_above_it_is_gone(outside: OutsideOperations) -> None:
    mode = _Mode()
    outside.start()
    with mode:
        outside.stop()
        assert _get_current_function_mode_stack()[-1] is mode
        torch.log(torch.zeros(())) * 0
    assert outside.find() is None  # it was off
    outside.stop()
    assert not _get_current_function_mode_stack()


def test_backward_may_stop_it(outside: OutsideOperations) -> None:
    """Inside `loss.backward()` the mode is off the stack, and comes back on it."""
    x = torch.rand(3, requires_grad=True)
    outside.start()
    loss = (x * 2).sum()
    x.register_hook(lambda grad: outside.stop())
    loss.backward()
    torch.log(torch.zeros(())) * 0
    assert outside.find() is None
    outside.stop()
    assert not _get_current_function_mode_stack()
    outside.start()
    assert _get_current_function_mode_stack() == [outside]


def test_error_of_its_own_is_swallowed(
    outside: OutsideOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(OutsideOperations, "_note", fail)
    outside.start()
    assert float(torch.ones(3).sum()) == 3
    outside.stop()
    assert outside.find() is None


def test_error_of_an_operation_is_the_users(outside: OutsideOperations) -> None:
    outside.start()
    with pytest.raises(RuntimeError, match="size"):
        torch.ones(3) + torch.ones(4)
    outside.stop()


def test_only_so_many_operations_are_noted(outside: OutsideOperations) -> None:
    x = torch.ones(())
    outside.start()
    for _ in range(600):
        x = x + 1
    torch.sqrt(x - 9999)
    outside.stop()
    assert outside.find() is None  # beyond what is noted


def test_replay_is_not_noted(outside: OutsideOperations) -> None:
    model = Applied(lambda h: (h * 0 - 1).sqrt().sum())
    call = keep_call(model, (torch.randn(2, 4),), {})
    outside.start()
    origin = find_origin([call], backward=False)
    outside.stop()
    assert origin is not None
    assert origin.site == "/sqrt"
    assert outside.find() is None


def test_loss_of_minus_infinity_is_named(outside: OutsideOperations) -> None:
    output = torch.rand(4, requires_grad=True)
    outside.start()
    loss = output.sum()
    loss = loss + torch.log(loss - loss)  # minus infinity
    outside.stop()
    assert loss == -torch.inf
    origin = outside.find()
    assert origin is not None
    assert origin.site == f"{HERE}:{line_of('# ' + 'minus infinity', __file__)}/log"


def test_minus_infinity_that_is_not_the_loss_is_no_origin(outside: OutsideOperations) -> None:
    output = torch.rand(4, requires_grad=True)
    outside.start()
    best = torch.log(output.sum() * 0)
    loss = torch.maximum(best, output.mean())
    outside.stop()
    assert torch.isfinite(loss)
    assert outside.find() is None


def test_first_of_two_that_meet_is_named(outside: OutsideOperations) -> None:
    output = torch.rand(4, requires_grad=True)
    outside.start()
    early = torch.log(output * 0 - 1)  # early
    late = torch.sqrt(output * 0 - 1)
    (late * early).sum()
    outside.stop()
    origin = outside.find()
    assert origin is not None
    assert origin.site == f"{HERE}:{line_of('# ' + 'early', __file__)}/log"


def test_gradients_that_are_forgotten_are_not_noted(outside: OutsideOperations) -> None:
    model = nn.Linear(3, 3)
    model(torch.rand(2, 3)).sum().backward()
    outside.start()
    model.zero_grad()
    outside.stop()
    assert not outside._noted
    assert not outside._known
