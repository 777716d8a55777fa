"""Hooks on every module of the process, without what torch's global hooks break."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

import hookline as hl


class Failing(nn.Module):
    """Raise, after calling a child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()
        self.fails = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.child(x)
        if self.fails:
            raise ValueError("boom")
        return x


def _global_state() -> dict[str, Any]:
    return {
        name: dict(value)
        for name, value in vars(torch_module).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }


def test_a_model_session_registers_no_global_hook() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = _global_state()
    with hl.capture(model, "**", inputs=True, grads="all"), hl.edit(model, {"0": hl.scale(2)}):
        assert _global_state() == before
        assert not torch_module._has_any_global_hook()
        model(torch.ones(1, 2)).sum().backward()


def test_removed_global_hook_leaves_no_flag_behind() -> None:
    """Torch forgets one: `torch.compile` then warns for the rest of the process."""
    before = _global_state()
    handle = hl.hook(None, nn.Linear, lambda value, at: None)
    assert torch_module._has_any_global_hook()
    handle.remove()
    assert not torch_module._has_any_global_hook()
    assert _global_state() == before


def test_global_hook_sees_keyword_arguments_and_edits_them() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, by: Tensor) -> Tensor:
            return x * by

    seen: dict[str, Any] = {}
    with hl.hook(None, hl.port(Scaled, "input"), lambda value, at: seen.update(value)):
        Scaled()(torch.ones(1), by=torch.full((1,), 2.0))
    assert {name: value.item() for name, value in seen.items()} == {"x": 1.0, "by": 2.0}

    double = hl.hook(None, hl.port(Scaled, "input.by"), lambda value, at: value * 2, edit=True)
    with double:
        assert Scaled()(torch.ones(1), by=torch.full((1,), 2.0)).item() == 4.0


def test_exception_under_a_global_hook_is_raised_and_swallows_no_warning() -> None:
    model = Failing()
    seen: list[str] = []
    with (
        warnings.catch_warnings(record=True) as caught,
        hl.hook(None, "**", lambda value, at: seen.append(at.path)),
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            with pytest.raises(ValueError, match="boom"):
                model(torch.ones(1))
        model.fails = False
        model(torch.ones(1))
    assert caught == []
    assert seen == ["Identity", "Identity", "Identity", "Failing"]


def test_calls_and_visits_are_right_after_an_exception_under_a_global_hook() -> None:
    model = Failing()
    seen: list[tuple[str, int, int | None]] = []
    with hl.hook(None, "**", lambda value, at: seen.append((at.path, at.call, at.visit))):
        with pytest.raises(ValueError, match="boom"):
            model(torch.ones(1))
        model.fails = False
        model(torch.ones(1))
    assert seen == [("Identity", 0, 0), ("Identity", 1, 0), ("Failing", 1, 0)]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()])
def test_exception_caught_inside_a_model_is_no_end_of_its_call(error: BaseException) -> None:
    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raising = nn.Sequential(Raising())
            self.other = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ValueError, KeyboardInterrupt):
                self.raising(x)
            return self.other(x)

    model = nn.Sequential(Catching())
    seen: list[tuple[str, int, int | None]] = []
    with hl.hook(None, "**", lambda value, at: seen.append((at.path, at.call, at.visit))):
        model(torch.ones(1))
        model(torch.ones(1))
    names = ("Identity", "Catching", "Sequential")
    assert seen == [(name, call, 0) for call in range(2) for name in names]


def test_calls_are_counted_where_only_inner_modules_match() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen: list[tuple[int, int | None]] = []
    with hl.hook(None, nn.Linear, lambda value, at: seen.append((at.call, at.visit))):
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
        model[0](torch.ones(1, 2))
    assert seen == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0)]


def test_wrapper_inside_a_model_does_not_hide_what_is_around_it() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Tanh())
    seen: list[str] = []
    with hl.hook(None, "**", lambda value, at: seen.append(at.path)):
        model(torch.ones(1, 2))
    assert seen == ["Linear", "Tanh", "Sequential"]


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("is_noise", [False, True])
def test_removed_global_edit_is_repeated_in_a_recompute(is_reentrant: bool, is_noise: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh())
    x = torch.randn(3, 2, requires_grad=True)
    action = hl.noise(1.0) if is_noise else hl.scale(2)

    def run(forward: Any) -> tuple[Tensor, Tensor]:
        change = hl.hook(None, nn.Linear, action.apply, edit=True)
        out = forward()
        change.remove()
        (grad,) = torch.autograd.grad(out.sum(), x) if not is_reentrant else (None,)
        if grad is None:
            x.grad = None
            out.sum().backward()
            grad = x.grad
        del out
        assert not torch_module._has_any_global_hook()
        return grad

    plain = run(lambda: model(x))
    again = run(lambda: checkpoint(model, x, use_reentrant=is_reentrant))
    assert torch.equal(again, plain)


def test_removed_global_edit_does_not_touch_other_calls_while_it_waits() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.randn(3, 2, requires_grad=True)
    plain = model(x)
    change = hl.hook(None, nn.Linear, lambda value, at: value * 2, edit=True)
    out = checkpoint(model, x, use_reentrant=False)
    change.remove()
    assert torch.equal(model(x), plain)
    del out
    assert not torch_module._has_any_global_hook()


def test_wrapper_counts_once_under_a_global_hook() -> None:
    inner = nn.Linear(2, 2)
    wrapped = nn.DataParallel(inner) if not torch.cuda.is_available() else inner
    seen: list[str] = []
    with hl.hook(None, "**", lambda value, at: seen.append(at.path)):
        wrapped(torch.ones(1, 2))
    assert seen == ["Linear"]


def test_global_gradient_hook_gives_torchs_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    grads: dict[str, Tensor] = {}
    with hl.hook(None, hl.port(nn.Tanh, "output.grad"), lambda g, at: grads.update({at.path: g})):
        model(torch.ones(4, 2)).sum().backward()
    assert torch.equal(grads["Tanh"], model[2].weight.expand(4, 3))


def test_path_without_a_model_is_refused() -> None:
    with pytest.raises(hl.AddressError, match="there are no paths"):
        hl.hook(None, "layers.0", lambda value, at: None)
    assert not torch_module._has_any_global_hook()
