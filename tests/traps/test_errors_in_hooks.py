"""An error in a hook: its own type, the site in a note, and nothing of it left on the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


def _fail(*_: Any) -> Any:
    raise ZeroDivisionError("on purpose")


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


ATTACH: dict[str, tuple[Callable[[nn.Module], hl.Handle], str]] = {
    "value": (lambda m: hl.hook(m, "1", _fail), "1:output"),
    "input": (lambda m: hl.hook(m, "1:input", _fail), "1:input"),
    "value edit": (lambda m: hl.hook(m, "1", _fail, edit=True), "1:output"),
    "gradient": (lambda m: hl.hook(m, "1:output.grad", _fail), "1:output.grad"),
    "gradient edit": (lambda m: hl.hook(m, "1:input.grad", _fail, edit=True), "1:input"),
    "backward hook": (lambda m: hl.register_backward_hook(m, "1", _fail), "1:input.grad"),
    "backward pre hook": (lambda m: hl.register_backward_pre_hook(m, "1", _fail), "1:output.grad"),
    "forward hook": (lambda m: hl.register_forward_hook(m, "1", _fail), "1:output"),
    "forward pre hook": (lambda m: hl.register_forward_pre_hook(m, "1", _fail), "1:input"),
    "parameter": (lambda m: hl.hook(m, "1.weight:grad", _fail), "1.weight:grad"),
    "parameter value": (lambda m: hl.hook(m, "1.weight", _fail), "1.weight"),
}


@pytest.mark.parametrize("kind", ATTACH)
def test_error_keeps_its_type_and_names_the_site(kind: str) -> None:
    attach, address = ATTACH[kind]
    model = _net()
    attach(model)
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert any(f"`{address}" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("kind", ATTACH)
def test_hook_that_failed_is_removed_and_the_model_goes_on(kind: str) -> None:
    """Torch leaves the hook where it is, to fail again."""
    attach, _ = ATTACH[kind]
    model = _net()
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    model.zero_grad()
    handle = attach(model)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    assert not handle.is_live
    x.grad = None
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(x.grad, expected)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert model[1].weight._post_accumulate_grad_hooks in (None, {})


def test_other_sessions_go_on_after_an_error_in_one() -> None:
    model = _net()
    seen: list[Tensor] = []
    hl.hook(model, "1:output.grad", lambda grad, at: seen.append(grad))
    hl.hook(model, "0:output.grad", _fail)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 2


def test_error_in_a_captured_block_closes_the_capture_and_keeps_what_was_there() -> None:
    model = _net()
    capture = hl.capture(model, "0", grads=True)
    results: list[hl.Captured] = []

    def run() -> None:
        with capture as got:
            results.append(got)
            model(torch.ones(1, 2))
            _fail()

    with pytest.raises(ZeroDivisionError):
        run()
    assert results[0]["0"].output.shape == (1, 2)
    assert not any(one._forward_hooks for one in model.modules())


def test_error_in_the_model_itself_leaves_the_next_call_in_order() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor, *, fail: bool = False) -> Tensor:
            y = self.linear(x)
            if fail:
                raise ValueError("moody")
            return y

    model = Moody()
    seen: list[tuple[str, int, int | None]] = []
    hl.hook(model, "**", lambda value, at: seen.append((at.path, at.call, at.visit)))
    with pytest.raises(ValueError, match="moody"):
        model(torch.ones(1, 2), fail=True)
    model(torch.ones(1, 2))
    assert seen == [("linear", 0, 0), ("linear", 1, 0), ("", 1, 0)]


def test_error_in_a_hook_does_not_leave_grad_mode_or_autocast_changed() -> None:
    model = _net()
    hl.hook(model, "0", _fail)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 2))
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
