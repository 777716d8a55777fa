"""Gradient checkpointing of real models: the same values and gradients are captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_runs import assert_same_run, checkpoint_layers, keep_layers, step
from tiny_models import EXAMPLES, Example

import hookline as hl

both_kinds = pytest.mark.parametrize("use_reentrant", [False, True])


@pytest.fixture(params=["gpt2", "llama", "bert", "t5", "vit"])
def example(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]()


def capture(example: Example) -> Any:
    return hl.capture(example.model, "**", inputs=True, grads=True)


@both_kinds
def test_checkpointing_gives_the_same_captured_values_and_gradients(
    example: Example, use_reentrant: bool
) -> None:
    without = step(example, capture(example))
    checkpoint_layers(example.model, use_reentrant=use_reentrant)
    if use_reentrant:
        example.model.enable_input_require_grads()
    plain = step(example)
    watched = step(example, capture(example))
    assert_same_run(watched, plain)
    found, expected = watched.got.tensors(), without.got.tensors()
    assert found.keys() >= expected.keys()
    for address, tensor in expected.items():
        if use_reentrant and ".grad" in address:
            # Torch itself sums up a region's gradients apart then.
            torch.testing.assert_close(found[address], tensor, rtol=1e-5, atol=1e-7)
        else:
            assert found[address].equal(tensor), address
    keep_layers(example.model)
