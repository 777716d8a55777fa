"""Activation checkpointing runs a forward twice; what is captured is the first, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hookline as hl

KINDS = [False, True]

# The first pass of an outer reentrant checkpoint has no grad, so an inner one has nothing to do.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


class Model(nn.Module):
    """Three blocks, the middle one checkpointed as told."""

    def __init__(self, run: Callable[..., Any] | None) -> None:
        super().__init__()
        self.first = nn.Linear(2, 4)
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4))
        self.last = nn.Linear(4, 1)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.middle(x) if self.run is None else self.run(self.middle, x)
        return self.last(x)


def _nested(outer: bool, inner: bool) -> Callable[..., Any]:
    """Checkpoint a sequence, and its second half again inside."""

    def run(middle: nn.Sequential, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return checkpoint(middle[2:], middle[:2](x), use_reentrant=inner)

        return checkpoint(part, x, use_reentrant=outer)

    return run


def _in_two(middle: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint_sequential(middle, 2, x, use_reentrant=False)


RUNS: dict[str, Callable[..., Any] | None] = {
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not early stopping": partial(checkpoint, use_reentrant=False, early_stop=False),
    "non-reentrant in non-reentrant": _nested(False, False),
    "reentrant in non-reentrant": _nested(False, True),
    "non-reentrant in reentrant": _nested(True, False),
    "reentrant in reentrant": _nested(True, True),
    "sequential": _in_two,
}
SITES = ["first", "middle.0", "middle.1", "middle.2", "middle.3", "last"]


def _train(run: Callable[..., Any] | None, watch: Callable[[nn.Module], Any] | None) -> Any:
    """Give what a step computes, and what a capture of it holds."""
    torch.manual_seed(4)
    model = Model(run)
    x = torch.randn(3, 2)
    got = None
    if watch is None:
        out = model(x)
        out.square().sum().backward()
    else:
        with watch(model) as got:
            out = model(x)
            out.square().sum().backward()
    return [out, *(one.grad for one in model.parameters()), torch.rand(1)], got


@pytest.mark.parametrize("name", RUNS)
def test_capture_of_a_checkpointed_model_is_that_of_the_plain_one(name: str) -> None:
    _, plain = _train(None, lambda model: hl.capture(model, *SITES, inputs=True, grads=True))
    _, again = _train(RUNS[name], lambda model: hl.capture(model, *SITES, inputs=True, grads=True))
    assert len(again.calls) == 1
    assert [(one.path, one.visit) for one in again] == [(site, 0) for site in SITES]
    for site in SITES:
        assert torch.equal(again[site].output, plain[site].output), site
        assert torch.equal(again[site].input, plain[site].input), site
        torch.testing.assert_close(again[f"{site}:output.grad"], plain[f"{site}:output.grad"])
        assert len(again[site].grads()) == 1, site


@pytest.mark.parametrize("name", RUNS)
def test_watching_a_checkpointed_model_changes_no_bit(name: str) -> None:
    plain, _ = _train(RUNS[name], None)
    watched, _ = _train(
        RUNS[name], lambda model: hl.capture(model, *SITES, inputs=True, grads=True)
    )
    for before, after in zip(plain, watched, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("is_reentrant", KINDS)
def test_hooks_are_told_of_the_recompute(is_reentrant: bool) -> None:
    model = Model(partial(checkpoint, use_reentrant=is_reentrant))
    seen: list[tuple[str, bool, int | None]] = []
    with hl.hook(model, SITES, lambda value, at: seen.append((at.path, at.recompute, at.visit))):
        model(torch.randn(3, 2)).sum().backward()
    first = [(path, visit) for path, again, visit in seen if not again]
    assert first == [(site, 0) for site in SITES]
    repeated = [(path, visit) for path, again, visit in seen if again]
    assert repeated  # the recompute may stop early, but it starts at the front
    assert repeated == [(site, 0) for site in SITES[1 : 1 + len(repeated)]]


@pytest.mark.parametrize("is_reentrant", KINDS)
def test_module_that_runs_twice_in_a_region_keeps_its_visits_apart(is_reentrant: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, run: Callable[..., Any]) -> Tensor:
            return self.layer(run(lambda t: self.layer(self.layer(t).tanh()), x))

    model = Twice()
    x = torch.randn(1, 2, requires_grad=True)

    def capture(run: Callable[..., Any]) -> hl.Captured:
        with hl.capture(model, "layer", grads=True) as got:
            model(x, run).square().sum().backward()
        return got

    plain = capture(lambda function, t: function(t))
    again = capture(partial(checkpoint, use_reentrant=is_reentrant))
    assert [one.visit for one in again] == [0, 1, 2]
    for visit in range(3):
        assert torch.equal(again["layer", visit].output, plain["layer", visit].output)
        mine, theirs = (got["layer", visit].output.grad for got in (again, plain))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
def test_checkpoint_wrapper_does_not_show_in_names(kind: CheckpointImpl) -> None:
    model = Model(None)
    model.middle = checkpoint_wrapper(model.middle, checkpoint_impl=kind)
    with hl.capture(model, "**", grads=True) as got:
        out = model(torch.randn(3, 2))
        out.sum().backward()
    assert {one.path for one in got} == {"", "middle", *SITES}
    assert len(got) == 2 + len(SITES)
    assert torch.equal(got[""].output, out)
    assert torch.equal(got["middle:output.grad"], got["middle.3:output.grad"])


def test_reentrant_checkpoint_of_plain_data_says_why_there_is_no_gradient() -> None:
    """Torch computes no gradient at all there, but for a warning of its own."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with (
        pytest.warns(hl.HooklineWarning, match=r"0:output\.grad: no gradient"),
        hl.capture(model, "0", grads=True) as got,
    ):
        out = checkpoint(model, torch.ones(1, 2), use_reentrant=True)
    assert not out.requires_grad
    assert torch.equal(got["0"].output.tanh(), out)


@pytest.mark.parametrize("is_reentrant", KINDS)
def test_backward_twice_through_a_region_is_two_gradients_of_one_visit(is_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.randn(1, 2, requires_grad=True)
    with hl.capture(model, "0", grads=True) as got:
        out = checkpoint(model, x, use_reentrant=is_reentrant)
        out.sum().backward(retain_graph=True)
        (2 * out.sum()).backward()
    first, second = got["0"].grads()
    torch.testing.assert_close(second, 2 * first)
    torch.testing.assert_close(first, 1 - model(x).detach() ** 2)
    assert len(got) == 1


@pytest.mark.parametrize("is_reentrant", KINDS)
def test_two_calls_before_one_backward_keep_their_gradients(is_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    inputs = [torch.randn(1, 2, requires_grad=True) for _ in range(2)]
    with hl.capture(model, "0", grads=True) as got:
        outs = [checkpoint(model, x, use_reentrant=is_reentrant) for x in inputs]
        (outs[0].sum() + 5 * outs[1].sum()).backward()
    for index, scale in enumerate((1, 5)):
        expected = scale * (1 - model(inputs[index]).detach() ** 2)
        torch.testing.assert_close(got.calls[index]["0:output.grad"], expected)


def test_module_backward_hooks_fire_once_in_a_region() -> None:
    for is_reentrant in KINDS:
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        x = torch.randn(1, 2, requires_grad=True)
        seen: list[tuple[Tensor, Tensor]] = []

        def note(module: nn.Module, inputs: Any, outputs: Any, into: Any = seen) -> None:
            into.append((inputs[0], outputs[0]))

        with hl.register_backward_hook(model, "0", note):
            checkpoint(model, x, use_reentrant=is_reentrant).sum().backward()
        assert len(seen) == 1
        torch.testing.assert_close(seen[0][0], x.grad)
        torch.testing.assert_close(seen[0][1], 1 - model(x).detach() ** 2)
