"""Capture everything in real architectures: nothing changes, nothing is missing, all is true."""

from __future__ import annotations

import pytest
import torch
from model_runs import (
    assert_no_trace,
    assert_same_run,
    assert_same_tensors,
    plain_hooks,
    step,
    tensors_of,
)
from tiny_models import EXAMPLES, Example

import hookline as hl


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]()


def test_capturing_everything_leaves_every_bit_as_it_is(example: Example) -> None:
    plain = step(example)
    watched = step(example, hl.capture(example.model, "**", inputs=True, grads=True))
    assert_same_run(watched, plain)
    assert_same_run(step(example), plain)
    assert_no_trace(example.model)


def test_every_site_is_captured_or_its_absence_explained(example: Example) -> None:
    got = step(example, hl.capture(example.model, "**", inputs=True, grads=True)).got
    outcomes = {one.address: one for one in got.report().outcomes}
    for name, _ in example.model.named_modules():
        assert f"{name}:input" in outcomes
        output = outcomes[f"{name}:output"]
        # What never ran says so once, for its value and its gradient.
        assert output.status != "captured" or f"{name}:output.grad" in outcomes
    for one in got.report().problems:
        assert one.reason, one.address
        assert one.fix, one.address
    for address, one in outcomes.items():
        if one.status == "captured":
            assert address in got


def test_captured_outputs_are_what_a_plain_hook_saw(example: Example) -> None:
    with plain_hooks(example.model) as seen:
        step(example)
    got = step(example, hl.capture(example.model, "**", inputs=True, grads=True)).got
    visits = dict.fromkeys(seen, 0)
    for visit in got:
        assert_same_tensors(tensors_of(visit.output), seen[visit.path][visit.visit])
        visits[visit.path] += 1
    assert visits == {name: len(found) for name, found in seen.items()}


def test_captured_gradients_are_what_retain_grad_gives(example: Example) -> None:
    """Compare the modules that return one tensor of their own."""
    kept: dict[str, list[torch.Tensor]] = {}

    def keep(name: str):
        def hook(module, args, output) -> None:
            is_own = isinstance(output, torch.Tensor) and output.requires_grad
            if is_own and not output._is_view() and all(output is not one for one in args):
                output.retain_grad()
                kept.setdefault(name, []).append(output)

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in example.model.named_modules()]
    step(example)
    for handle in handles:
        handle.remove()
    got = step(example, hl.capture(example.model, "**", grads=True)).got
    compared = 0
    for name, outputs in kept.items():
        visits = [visit for visit in got if visit.path == name]
        assert len(visits) == len(outputs)
        for visit, output in zip(visits, outputs, strict=True):
            if output.grad is None:
                assert visit.grads() == []
            else:
                assert visit.grads()[0].equal(output.grad)
                compared += 1
    assert compared or not kept


def test_input_gradients_change_parameter_gradients_by_rounding_only(example: Example) -> None:
    example = example._replace(model=example.model.double(), args=tuple(map(_double, example.args)))
    example = example._replace(kwargs={k: _double(v) for k, v in example.kwargs.items()})
    plain = step(example)
    watched = step(example, hl.capture(example.model, "**", inputs=True, grads="all"))
    assert_same_tensors(watched.output, plain.output)
    assert watched.random_state.equal(plain.random_state)
    for name, grad in plain.grads.items():
        found = watched.grads[name]
        assert (found is None) is (grad is None), name
        if grad is not None and found is not None:
            torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-11)


def _double(value):
    is_float = hasattr(value, "double") and getattr(value, "data", value).is_floating_point()
    if not is_float:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().double().requires_grad_(value.requires_grad)
    return value.double()
