"""What every test starts from: one thread, one seed, the same Hypothesis examples each time."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# Inductor has processes of its own else, which tests that count children would find.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# No deadline: the first call into torch is slow, and says nothing about the code under test.
hypothesis.settings.register_profile("hookline", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("hookline")


@pytest.fixture(autouse=True)
def seed_torch() -> None:
    """Give each test the same random numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Give a test a compiler that has seen nothing, and leave none of its graphs to others."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def freeze_what_is_there() -> Iterator[None]:
    """Have the collector look at what a file's tests make, not at all that was loaded before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
