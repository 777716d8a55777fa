"""Mixed precision, optimizers and saved-tensor hooks around a model that is watched."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hookline as hl


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def test_gradients_under_a_loss_scaler_are_captured_raw() -> None:
    """hookline reports what backward computed: with a scaler that is the gradient times scale."""
    model = _model()
    x = torch.randn(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hl.capture(model, "2", "2.weight:grad", grads=True) as got:
        scaler.scale(model(x).sum()).backward()
    assert torch.equal(got["2:output.grad"], torch.full((4, 1), 1024.0))
    assert torch.equal(got["2.weight:grad"], model[2].weight.grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.unscale_(optimizer)
    # Unscaling writes into .grad afterwards: what was captured is still what backward computed.
    assert torch.equal(got["2.weight:grad"], model[2].weight.grad * 1024)


def test_observing_under_autocast_is_bit_identical() -> None:
    def run(watch: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = _model()
        x = torch.randn(4, 2)
        with torch.autocast("cpu", torch.bfloat16):
            if watch:
                seen: list[tuple[torch.dtype, bool]] = []

                def look(value: Tensor, at: hl.At) -> None:
                    seen.append((value.dtype, torch.is_autocast_enabled("cpu")))

                with hl.capture(model, "**", grads=True) as got, hl.hook(model, "0", look):
                    out = model(x)
                    assert torch.is_autocast_enabled("cpu")
                    out.float().sum().backward()
                assert got["0"].output.dtype is torch.bfloat16
                assert seen == [(torch.bfloat16, False)]
            else:
                out = model(x)
                out.float().sum().backward()
        return [out, *(one.grad for one in model.parameters())]

    for plain, watched in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, watched)


def test_edit_under_autocast_runs_in_autocast_and_keeps_the_type() -> None:
    model = _model()
    with (
        torch.autocast("cpu", torch.bfloat16),
        hl.edit(model, {"0": hl.add(torch.ones(3))}),
        hl.capture(model, "0") as got,
    ):
        model(torch.zeros(1, 2))
    assert got["0"].output.dtype is torch.bfloat16
    torch.testing.assert_close(
        got["0"].output, (model[0].bias + 1)[None].bfloat16(), atol=1e-2, rtol=1e-2
    )


def test_training_while_captured_gives_bit_identical_weights() -> None:
    def train(watch: bool) -> list[Tensor]:
        torch.manual_seed(2)
        model = _model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        hooks_before = dict(optimizer._optimizer_step_pre_hooks)
        for _ in range(3):
            x = torch.randn(8, 2)
            optimizer.zero_grad()
            if watch:
                with hl.capture(model, "**", inputs=True, grads=True, params=True) as got:
                    model(x).square().mean().backward()
                assert torch.equal(got["0.weight:grad"], model[0].weight.grad)
            else:
                model(x).square().mean().backward()
            optimizer.step()
        assert dict(optimizer._optimizer_step_pre_hooks) == hooks_before
        return [*model.parameters()]

    for plain, watched in zip(train(False), train(True), strict=True):
        assert torch.equal(plain, watched)


def test_parameter_captured_before_a_step_keeps_its_value() -> None:
    model = _model()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hl.capture(model, "0.weight", "0.weight:grad") as got:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert torch.equal(got["0.weight"], before)
    assert torch.equal(got["0.weight"] - got["0.weight:grad"], model[0].weight)


def test_step_inside_backward_sees_the_edited_gradient_and_is_captured() -> None:
    """An optimizer that steps in a post-accumulate hook and frees the gradient."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    applied: list[float] = []

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        applied.append(parameter.grad.item())
        parameter.grad = None

    with hl.capture(model, "0.weight:grad") as got:
        handle = model[0].weight.register_post_accumulate_grad_hook(step)
        model(torch.full((1, 1), 3.0)).sum().backward()
        handle.remove()
    assert got["0.weight:grad"].item() == 3.0
    assert applied == [3.0]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_shared_weight_under_checkpoint_keeps_the_gradient_autograd_ends_with(
    is_reentrant: bool,
) -> None:
    """Reentrant checkpoints accumulate in parts; the last one captured is the whole gradient."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight)
    x = torch.ones(1, 1, requires_grad=True)
    with hl.capture(model, "0.weight:grad") as got:
        hidden = checkpoint(model, x, use_reentrant=is_reentrant)
        checkpoint(model, hidden, use_reentrant=is_reentrant).sum().backward()
    latest = got.calls[-1]["0.weight:grad"]
    assert torch.equal(latest, model[0].weight.grad)
    assert latest.item() == 2.0


def test_parameter_hook_may_return_anything() -> None:
    """Torch raises for a post-accumulate hook that returns something."""
    model = _model()
    with hl.hook(model, "0.weight:grad", lambda grad, at: (1,)):
        model(torch.ones(1, 2)).sum().backward()
    assert model[0].weight.grad is not None


def test_parameter_gradient_edit_is_what_the_optimizer_sees() -> None:
    model = _model()
    x = torch.ones(1, 2)
    model(x).sum().backward()
    plain = model[0].weight.grad.clone()
    model.zero_grad()
    with hl.edit(model, {"0.weight:grad": hl.scale(2)}):
        model(x).sum().backward()
    assert torch.equal(model[0].weight.grad, plain * 2)


def test_saved_tensor_hooks_of_the_user_see_the_same_tensors() -> None:
    """hookline saves nothing for backward and puts no saved-tensor hooks in the way."""

    def count(watch: bool) -> list[tuple[int, ...]]:
        model = _model()
        packed: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tuple(tensor.shape))
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            if watch:
                with hl.capture(model, "**", inputs=True, grads="all"):
                    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
            else:
                model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        return packed

    assert count(True) == count(False)


def test_graph_dropped_without_backward_frees_what_was_watched() -> None:
    model = _model()
    told = pytest.warns(hl.HooklineWarning, match="no backward reached")
    with (
        told,
        hl.capture(model, "**", grads=True) as got,
    ):
        x = torch.ones(1, 2, requires_grad=True)
        out = model(x)
    held = [weakref.ref(one.output) for one in got]
    leaf = weakref.ref(x)  # held by the graph
    del x
    assert leaf() is not None
    assert all(one() is not None for one in held)
    del out, got
    gc.collect()
    assert leaf() is None
    assert not any(one() is not None for one in held)


def test_double_step_of_optimizer_subclasses_cannot_reach_hookline() -> None:
    """Torch fires step hooks twice for some subclasses; hookline registers none, anywhere."""
    from torch.optim import optimizer as torch_optimizer

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.capture(model, "**", grads=True, params=True):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        registered: dict[str, Any] = {
            **torch_optimizer._global_optimizer_pre_hooks,
            **torch_optimizer._global_optimizer_post_hooks,
            **optimizer._optimizer_step_pre_hooks,
            **optimizer._optimizer_step_post_hooks,
        }
    assert registered == {}
