"""Captures and gradient hooks under torch.func, autocast and checkpointing, with odd tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from tricky_modules import Calling, Model

import hookline as hl
from hookline._torch import in_forward_mode


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def _loss(model: nn.Module) -> Any:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    return loss


def test_functional_gradient_is_unchanged_and_observed() -> None:
    """Torch's full backward hook raises under `torch.func.grad`."""
    model = _net()
    parameters, x = _parameters(model), torch.randn(2, 3)
    expected = torch.func.grad(_loss(model))(parameters, x)
    with hl.capture(model, "1", grads=True) as got:
        mine = torch.func.grad(_loss(model))(parameters, x)
    assert all(torch.equal(mine[name], expected[name]) for name in expected)
    torch.testing.assert_close(got["1"].output, torch.tanh(model[0](x)).detach())
    torch.testing.assert_close(got["1:output.grad"], model[2].weight.detach().expand(2, 3))


def test_per_sample_gradients_are_unchanged_and_what_is_kept_is_a_plain_tensor() -> None:
    """What a torch hook stores under `vmap` is a wrapper that may not escape."""
    model = _net()
    parameters, x = _parameters(model), torch.randn(5, 3)
    per_sample = torch.func.vmap(torch.func.grad(_loss(model)), in_dims=(None, 0))
    expected = per_sample(parameters, x)
    with hl.capture(model, "1", grads=True) as got:
        mine = per_sample(parameters, x)
    for name in expected:
        torch.testing.assert_close(mine[name], expected[name])
    torch.testing.assert_close(got["1"].output, torch.tanh(model[0](x)).detach())
    assert got["1:output.grad"].shape == (5, 3)


def test_forward_mode_passes_through_watched_modules() -> None:
    model = _net()
    parameters, x, tangent = _parameters(model), torch.randn(2, 3), torch.randn(2, 3)

    def run(value: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (value,))

    expected = torch.func.jvp(run, (x,), (tangent,))
    with hl.capture(model, "*") as got:
        mine = torch.func.jvp(run, (x,), (tangent,))
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    torch.testing.assert_close(got["1"].output, torch.tanh(model[0](x)).detach())


@pytest.mark.parametrize("where", ["*:input.grad", "*:output.grad", "view:output.grad"])
def test_dual_numbers_pass_through_watched_gradients(where: str) -> None:
    """Forward-mode autograd without `torch.func`."""
    model = nn.Sequential(*_net())
    model.add_module("view", nn.Flatten(0))
    x, tangent = torch.randn(2, 3), torch.randn(2, 3)

    def run() -> tuple[Tensor, Tensor]:
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))))

    expected = run()
    with hl.hook(model, where, lambda grad, at: None):
        mine = run()
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


@pytest.mark.parametrize("is_functional", [False, True])
def test_arguments_with_and_without_a_tangent_pass_through_one_tap(is_functional: bool) -> None:
    model = Model(Calling(lambda m, a, b: a * b), lambda inner, h: inner(h, b=inner.weight * 2))
    x, tangent = torch.randn(2, 4), torch.randn(2, 4)

    def run() -> tuple[Tensor, ...]:
        if is_functional:
            return torch.func.jvp(model, (x,), (tangent,))
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))))

    expected = run()
    with hl.register_backward_hook(model, "inner", lambda *a: None):
        mine = run()
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_forward_mode_passes_through_tapped_inputs() -> None:
    model = _net()
    x, tangent = torch.randn(2, 3), torch.randn(2, 3)
    expected = torch.func.jvp(model, (x,), (tangent,))
    with hl.hook(model, "*:input.grad", lambda grad, at: None):
        mine = torch.func.jvp(model, (x,), (tangent,))
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_gradient_edit_under_functional_gradient() -> None:
    model = _net()
    parameters, x = _parameters(model), torch.randn(2, 3)
    expected = torch.func.grad(_loss(model))(parameters, x)
    with hl.edit(model, {"1:output.grad": hl.scale(10)}):
        mine = torch.func.grad(_loss(model))(parameters, x)
    torch.testing.assert_close(mine["0.weight"], expected["0.weight"] * 10)
    torch.testing.assert_close(mine["2.weight"], expected["2.weight"])


def test_autocast_output_and_gradient_have_the_type_that_flowed() -> None:
    model = _net()
    x = torch.randn(2, 3)
    with hl.capture(model, "0", "1:input", grads=True) as got:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().sum()
        loss.backward()
    assert got["0"].output.dtype is torch.bfloat16
    assert got["0:output.grad"].dtype is torch.bfloat16
    assert got["0"].output.grad.dtype is torch.bfloat16
    assert got["1:input.input"].dtype is torch.bfloat16


def test_autocast_run_is_bit_identical_and_observers_are_outside_of_it() -> None:
    model = _net()
    x = torch.randn(2, 3)
    seen: list[Any] = []

    def step() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters())]

    expected = step()
    hl.hook(model, "0", lambda value, at: seen.append((value.float() @ value.float().t()).dtype))
    hl.hook(model, "0:output.grad", lambda grad, at: seen.append(grad.dtype))
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_module_that_returns_a_view(reentrant: bool) -> None:
    def call(inner: nn.Module, h: Tensor) -> Tensor:
        y = checkpoint(inner, h, use_reentrant=reentrant)
        return y.relu() * 2

    model = Model(Calling(lambda m, h: (h * m.weight).view(2, -1)), call)
    x = torch.randn(4, 4, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    with hl.capture(model, "inner", grads=True) as got:
        model(x).sum().backward()
    torch.testing.assert_close(x.grad, expected)
    assert len(got["inner"].grads()) == 1
    torch.testing.assert_close(got["inner:output.grad"], 2 * (got["inner"].output > 0).float())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_inplace_module_has_the_right_gradient(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    model = Model(block, lambda inner, h: checkpoint(inner, h, use_reentrant=reentrant))
    x = torch.randn(4, 4, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    seen: list[Tensor] = []
    hl.register_backward_hook(model, "inner.1", lambda m, gi, go: seen.append(gi[0]))
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, expected)
    assert len(seen) == 1


def test_complex_values_and_gradients() -> None:
    model = nn.Sequential(Calling(lambda m, x: torch.fft.fft(x * m.weight)))
    x = torch.randn(2, 4, requires_grad=True)
    with hl.capture(model, "0", grads=True) as got:
        y = model(x)
        y.retain_grad()
        y.abs().sum().backward()
    assert got["0"].output.is_complex()
    assert torch.equal(got["0:output.grad"], y.grad)
    with hl.edit(model, {"0": hl.scale(2), "0:output.grad": hl.scale(0.5)}):
        edited = model(x)
        edited.abs().sum().backward()
    assert torch.equal(edited, y * 2)


def test_double_precision_and_half_precision_gradients_keep_their_type() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).to(dtype)
        with hl.capture(model, "0", "1:input", grads=True) as got:
            model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        assert got["0:output.grad"].dtype is dtype
        assert got["1:input.input.grad"].dtype is dtype


def test_empty_and_zero_dimensional_tensors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Calling(lambda m, x: x.sum()))
    with hl.capture(model, "*", grads=True) as got:
        model(torch.ones(0, 2)).backward()
    assert got["0"].output.shape == (0, 2)
    assert got["0:output.grad"].shape == (0, 2)
    assert got["1:output.grad"].item() == 1.0


def test_anomaly_mode_changes_nothing() -> None:
    model = _net()
    x = torch.randn(2, 3, requires_grad=True)
    seen: list[Any] = []
    hl.register_backward_hook(model, "**", lambda m, gi, go: seen.append(gi))
    hl.hook(model, "**:input.grad", lambda grad, at: None)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
    ):
        model(x).sum().backward()
    assert len(seen) == 4


def test_saved_tensor_hooks_of_the_user_stay_in_effect() -> None:
    model = _net()
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(1)
        return tensor

    def count() -> int:
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        return len(packed)

    expected = count()
    with hl.capture(model, "**", inputs=True, grads="all"):
        assert count() == expected


def test_forward_mode_is_known_only_inside_a_level() -> None:
    assert not in_forward_mode()
    with forward_ad.dual_level():
        assert in_forward_mode()
    assert not in_forward_mode()
    seen: list[bool] = []
    one = (torch.ones(1),)
    torch.func.jvp(lambda x: seen.append(in_forward_mode()) or x * 2, one, one)
    assert seen == [True]
