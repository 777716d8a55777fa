"""An edited parameter inside a checkpointed region: the recompute uses the one the forward used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

KINDS = [False, True]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh())


def _gradients(model: nn.Sequential, x: Tensor) -> list[Tensor | None]:
    found = [x.grad, *(one.grad for one in model.parameters())]
    x.grad = None
    model.zero_grad()
    return found


@pytest.mark.parametrize("is_reentrant", KINDS)
def test_weight_edit_in_place_through_backward_gives_the_plain_gradient(is_reentrant: bool) -> None:
    model = _model()
    x = torch.randn(3, 2, requires_grad=True)
    with hl.edit(model, {"0.weight": hl.scale(2)}):
        model(x).square().sum().backward()
    plain = _gradients(model, x)
    with hl.edit(model, {"0.weight": hl.scale(2)}):
        checkpoint(model, x, use_reentrant=is_reentrant).square().sum().backward()
    for before, after in zip(plain, _gradients(model, x), strict=True):
        torch.testing.assert_close(after, before)


@pytest.mark.parametrize("is_reentrant", KINDS)
def test_weight_edit_removed_before_backward_is_repeated_or_refused(is_reentrant: bool) -> None:
    """Recomputing with the weight put back would give another function's gradient, unsaid."""
    model = _model()
    x = torch.randn(3, 2, requires_grad=True)
    with hl.edit(model, {"0.weight": hl.scale(2)}):
        model(x).square().sum().backward()
    plain = _gradients(model, x)
    handle = hl.edit(model, {"0.weight": hl.scale(2)})
    out = checkpoint(model, x, use_reentrant=is_reentrant)
    try:
        handle.remove()
        out.square().sum().backward()
    except hl.HooklineError:
        return
    for before, after in zip(plain, _gradients(model, x), strict=True):
        torch.testing.assert_close(after, before)


@pytest.mark.parametrize("is_reentrant", KINDS)
def test_weight_edits_of_two_calls_are_not_mixed_in_the_recompute(is_reentrant: bool) -> None:
    """Noise differs from call to call; each region has to see that of its own call."""
    model = _model()
    x = torch.randn(3, 2, requires_grad=True)

    def step(run: Any) -> list[Tensor | None]:
        with hl.edit(model, {"2.weight": hl.noise(1.0)}):
            outs = [run(x), run(x)]
            assert not torch.equal(outs[0], outs[1])
            sum((i + 1) * out.square().sum() for i, out in enumerate(outs)).backward()
        return _gradients(model, x)

    plain = step(model)
    try:
        again = step(lambda t: checkpoint(model, t, use_reentrant=is_reentrant))
    except hl.HooklineError:
        return
    for before, after in zip(plain, again, strict=True):
        torch.testing.assert_close(after, before)
