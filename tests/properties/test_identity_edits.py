"""An edit that changes nothing changes nothing: random models run the same to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from comparing_runs import assert_no_trace, assert_same_run
from hypothesis import given, settings
from random_models import Spec, models
from random_modules import Scale
from torch import nn
from twin_runs import run, run_plain

import hookline as hl

# What these return is new, so nothing else changes with it.
FRESH = (nn.Linear, nn.LayerNorm, nn.GELU, Scale)


def test_edits_that_return_the_value_leave_every_bit_as_it_is() -> None:
    @settings(max_examples=60)
    @given(models())
    def every_model(spec: Spec) -> None:
        def watch(model: nn.Module) -> Any:
            same = {"**": lambda value, at: value, "**:input": lambda value, at: hl.KEEP}
            return hl.edit(model, same)

        plain = run_plain(spec)
        watched = run(spec, watch)
        if plain.error is None:
            assert_same_run(watched, plain)
            assert_no_trace(watched, plain)
        else:
            assert type(watched.error) is type(plain.error)

    every_model()


def test_scaling_new_values_by_one_leaves_every_bit_as_it_is() -> None:
    """Checkpoints stay: the edit is made again while they are computed again."""
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(models())
    def every_model(spec: Spec) -> None:
        plain = run_plain(spec)
        if plain.error is not None:
            return
        assert plain.model is not None
        called = {name for name, _, _ in plain.values}
        names = [
            name
            for name, module in plain.model.named_modules()
            if isinstance(module, FRESH) and name in called
        ]
        if not names:
            return
        watched = run(spec, lambda model: hl.edit(model, dict.fromkeys(names, hl.scale(1.0))))
        assert_same_run(watched, plain)
        seen["edited"] += len(names)

    every_model()
    assert seen["edited"] > 100, seen


def test_captures_beside_identity_edits_see_the_same_values() -> None:
    @settings(max_examples=40)
    @given(models())
    def every_model(spec: Spec) -> None:
        plain = run_plain(spec)
        if plain.error is not None:
            return

        @contextmanager
        def watch(model: nn.Module) -> Iterator[hl.Captured]:
            with (
                hl.edit(model, {"**": lambda value, at: value}),
                hl.capture(model, "**", clone=True) as got,
            ):
                yield got

        watched = run(spec, watch)
        assert_same_run(watched, plain)
        for visit in watched.got:
            output = visit.output
            if isinstance(output, torch.Tensor):
                assert output.equal(plain.values[visit.path, visit.visit, "output"][0])

    every_model()
