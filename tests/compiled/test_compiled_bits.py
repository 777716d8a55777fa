"""A compiled training computes what it computes unwatched, to the last bit, also in bfloat16.

Inductor rounds where it writes a value to memory, and decides by who reads it whether it does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from compared_bits import LENGTH, SAME, WORDS, Outcome, SmallGPT, compare_outcomes
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import hookline as hl
from hookline.hooks.inductor import part_undisturbed

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Give each test a compiler that has seen nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", ["bfloat16", "autocast"])
def test_inductor_gives_the_same_bits(dtype: str) -> None:
    options: Any = {"device": "cpu", "dtype": dtype, "mode": "default", "steps": 4}
    plain = Outcome(**options, is_watched=False)
    watched = Outcome(**options, is_watched=True)
    assert compare_outcomes(plain, watched) == SAME
    assert watched.watch is not None
    assert watched.watch.notes == []
    assert len(watched.watch.history.steps) == 4
