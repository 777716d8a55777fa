"""Observing changes nothing: random models run the same to the bit, watched or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from comparing_runs import assert_no_trace, assert_same_run, is_close, same_bits
from hypothesis import given, settings
from random_models import Spec, models
from torch import nn
from twin_runs import Run, Watch, run, run_plain, run_touched

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


OBSERVING: list[Watch] = [capture_values, capture_everything, hook_everything]
TOGETHER: list[Watch] = [hook_backward, hook_backward_pre]
TAPPING: list[Watch] = [capture_input_gradients, *TOGETHER]


def check(spec: Spec, watch: Watch, seen: Counter[str]) -> None:
    """Compare a watched run of a model with a plain one."""
    plain = run_plain(spec)
    watched = run(spec, watch)
    if plain.error is not None:
        seen["raised"] += 1
        assert isinstance(watched.error, type(plain.error)), watched.error
        return
    if isinstance(watched.error, hl.GradientError):
        seen["refused"] += 1
        assert plain.changed_alias or (watch in TAPPING and plain.changed_argument)
        return
    if watch in TOGETHER and not _is_alike(watched, plain):
        # The gradients of all outputs of a module are wanted together, so backward runs behind all
        # of them as soon as it reaches one; torch's own backward hooks do the same.
        seen["together"] += 1
        plain = run_touched(spec)
        if plain.error is not None:
            assert isinstance(watched.error, type(plain.error)), watched.error
            return
    seen["compared"] += 1
    regroups = watch in TAPPING or (watch is not capture_values and plain.tap_would_regroup)
    seen["exact"] += not regroups
    assert_same_run(watched, plain, is_close if regroups else same_bits)
    assert_no_trace(watched, plain)


def _is_alike(watched: Run, plain: Run) -> bool:
    return watched.error is None and all(
        same_bits(watched.buffers[name], buffer) for name, buffer in plain.buffers.items()
    )


@pytest.mark.parametrize("watch", OBSERVING)
def test_observing_leaves_every_bit_as_it_is(watch: Watch) -> None:
    """A gradient is compared by rounding only where a module hands an input back as its output.

    There the gradient of the output is a part of the gradient of the input, and has to be summed
    apart to be seen.
    """
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(models())
    def every_model(spec: Spec) -> None:
        check(spec, watch, seen)

    every_model()
    assert seen["exact"] >= 20, seen


@pytest.mark.parametrize("watch", TAPPING)
def test_input_taps_change_gradients_by_rounding_only(watch: Watch) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(models())
    def every_model(spec: Spec) -> None:
        check(spec, watch, seen)

    every_model()
    assert seen["compared"] >= 30, seen


def around(kind: str, *parts: Spec, variant: int = 0) -> Spec:
    return Spec(kind, parts, variant)


def in_row(*kinds: str) -> Spec:
    return Spec("sequential", tuple(Spec(kind) for kind in kinds))


HARD = {
    "a view is changed in place and its base used again": around(
        "residual", in_row("view", "dropout inplace")
    ),
    "an input handed back is changed in place and used again": around(
        "containers", in_row("identity", "mul inplace")
    ),
    "an unused output of a module that changed its input": around(
        "partly", around("residual", Spec("off"), variant=1)
    ),
    "two in-place modules in a row, and their input used again": around(
        "residual", in_row("relu inplace", "dropout inplace")
    ),
    "an identity and an in-place module, and their input used again": around(
        "residual", in_row("identity", "relu inplace")
    ),
    "one of two views made at once is changed in place": in_row("linear", "chunk inplace"),
    "an unused output behind a checkpoint with batch norm": in_row("linear")._replace(
        parts=(Spec("linear"), around("partly", around("checkpoint", Spec("batchnorm"))))
    ),
    "one of two views is changed in place where no gradient comes": around(
        "partly", around("tied", Spec("chunk inplace"))
    ),
    "a checkpoint inside a checkpoint": around(
        "checkpoint", around("checkpoint", in_row("linear", "dropout"), variant=1)
    ),
    "a shared module with dropout in a checkpoint": around(
        "shared", around("checkpoint", in_row("dropout", "linear")), variant=1
    ),
}


@pytest.mark.parametrize("watch", [*OBSERVING, *TAPPING])
@pytest.mark.parametrize("name", HARD)
def test_hard_model_runs_as_without_hookline_or_is_refused(name: str, watch: Watch) -> None:
    check(Spec("root", (HARD[name],), 40), watch, Counter())


@pytest.mark.parametrize("watch", [*OBSERVING, *TAPPING])
def test_error_of_a_model_is_all_that_is_heard_of_it(watch: Watch) -> None:
    """A hook that fails as well, after the model did, would have torch warn of it."""
    check(Spec("root", (Spec("chunk inplace"),), 0), watch, Counter())
