"""Observing changes nothing: random models run the same to the bit, watched or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from random_models import Spec, models
from torch import nn
from twin_runs import (
    Watch,
    assert_no_trace,
    assert_same_run,
    is_close,
    run,
    run_plain,
    same_bits,
)

import hookline as hl


def capture_values(model: nn.Module) -> Any:
    return hl.capture(model, "**", inputs=True)


def capture_everything(model: nn.Module) -> Any:
    return hl.capture(model, "**", inputs=True, grads=True, params=True)


@contextmanager
def hook_everything(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for where in ("**", "**:input", "**:output.grad"):
            stack.enter_context(hl.hook(model, where, lambda value, at: None))
        yield


def capture_input_gradients(model: nn.Module) -> Any:
    return hl.capture(model, "**", inputs=True, grads="all")


def hook_backward(model: nn.Module) -> Any:
    return hl.register_backward_hook(model, "**", lambda module, grad_input, grad_output: None)


def hook_backward_pre(model: nn.Module) -> Any:
    return hl.register_backward_pre_hook(model, "**", lambda module, grad_output: None)


def check(spec: Spec, watch: Watch, *, taps_inputs: bool, seen: Counter[str]) -> None:
    plain = run_plain(spec)
    watched = run(spec, watch)
    if plain.error is not None:
        seen["raised"] += 1
        assert isinstance(watched.error, type(plain.error)), watched.error
    elif isinstance(watched.error, hl.GradientError):
        seen["refused"] += 1
        assert plain.changed_alias
    else:
        seen["compared"] += 1
        regroups = taps_inputs or (watch is not capture_values and plain.tap_would_regroup)
        seen["exact"] += not regroups
        assert_same_run(watched, plain, is_close if regroups else same_bits)
        assert_no_trace(watched, plain)


@pytest.mark.parametrize("watch", [capture_values, capture_everything, hook_everything])
def test_observing_leaves_every_bit_as_it_is(watch: Watch) -> None:
    """A gradient is compared by rounding only where a module hands an input back as its output.

    There the gradient of the output is a part of the gradient of the input, and has to be summed
    apart to be seen.
    """
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(models())
    def every_model(spec: Spec) -> None:
        check(spec, watch, taps_inputs=False, seen=seen)

    every_model()
    assert seen["exact"] >= 20, seen


@pytest.mark.parametrize("watch", [capture_input_gradients, hook_backward, hook_backward_pre])
def test_input_taps_change_gradients_by_rounding_only(watch: Watch) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(models())
    def every_model(spec: Spec) -> None:
        check(spec, watch, taps_inputs=True, seen=seen)

    every_model()
    assert seen["compared"] >= 30, seen
